"""The meter's numbers against arithmetic."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unmask.training import speed


def test_meter_divides_by_its_own_clock(monkeypatch):
    clock = iter([10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(speed, "peak_flops", lambda device, dtype: 1000.0)
    meter = speed.Meter(torch.device("cpu"), torch.float32)
    for tokens, flops in [(30, 600.0), (60, 900.0)]:
        meter.start()
        meter.add(tokens, flops)
    read = meter.read()
    assert read["tokens_per_second"] == pytest.approx(90 / 3)
    assert read["mfu"] == pytest.approx(1500 / 3 / 1000)
    assert meter.tokens == 0 and meter.seconds == 0


def test_peak_of_this_machine_is_plausible():
    assert 1e9 < speed.peak_flops(torch.device("cpu"), torch.float32) < 1e15


def test_gpus_are_found_by_the_longest_name(monkeypatch):
    cuda = torch.device("cuda")
    for name, half, single in [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.peak_flops(cuda, torch.bfloat16) == pytest.approx(half)
        assert speed.peak_flops(cuda, torch.float32) == pytest.approx(single)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some other card")
    assert speed.peak_flops(cuda, torch.float32) is None


def test_memory_is_the_peak_in_bytes():
    """In a process of its own, whose peak is known; Linux counts pages in batches, so to 1 MB."""
    program = """
import torch
from unmask.training.speed import memory
cpu, large = torch.device("cpu"), 256 * 2**20
before = memory(cpu)
held = torch.ones(large, dtype=torch.uint8)
now = memory(cpu)
del held
assert abs(now - before - large) < 8 * 2**20, (before, now)
assert abs(memory(cpu) - now) < 2**20
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's own peak")
def test_memory_is_not_that_of_the_program_that_started_this_one():
    """getrusage's maximum goes on to the programs that a process starts."""
    program = "from unmask.hardware import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * 2**20 < speed.memory(torch.device("cpu"))
