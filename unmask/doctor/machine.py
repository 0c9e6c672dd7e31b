"""What the machine is and how fast: processor, GPUs, matrix products, process groups, the disk for the runs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unmask.hardware import matrix_rate, processor

#: Bytes written to measure the disk, and below how many free ones a run is likely to fail.
WRITTEN, ROOM = 64 * 2**20, 2**30


def python() -> dict[str, Any]:
    return {"version": platform.python_version(), "executable": sys.executable, "system": platform.platform()}


def cpu() -> dict[str, Any]:
    """The processor and what torch makes of it; matrix products in GFLOP/s."""
    import torch

    features = {"amx": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
    return {
        "name": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        **{name: bool(getattr(torch.cpu, probe, bool)()) for name, probe in features.items()},
        "memory_gb": _memory() / 2**30,
        "gflops": rates("cpu"),
    }


def devices() -> dict[str, Any]:
    """What training would run on: every GPU that this torch sees, or the processor."""
    import torch

    found: dict[str, Any] = {"used": "cuda" if torch.cuda.is_available() else "cpu", "built_for": _built_for()}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_gb": device.total_memory / 2**30,
            "bf16": torch.cuda.is_bf16_supported(),
            "flash_attention": torch.backends.cuda.is_flash_attention_available(),
            "flex_attention": "flex" in backends("cuda"),
            "gflops": rates(f"cuda:{number}"),
        }
    found["attention"] = backends(found["used"])
    return found


def backends(device: str) -> list[str]:
    """The attention backends that work on a device: FlexAttention has no backward on a CPU and needs Triton."""
    from importlib.util import find_spec

    flex = device != "cpu" and find_spec("triton") is not None
    return ["tiles", *(["flex"] if flex else []), "reference"]


def _built_for() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def distributed() -> dict[str, Any]:
    """How several processes can talk."""
    import torch.distributed as dist

    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def rates(device: str) -> dict[str, float]:
    """GFLOP/s of matrix products by dtype."""
    import torch

    size = 1024 if device == "cpu" else 8192
    dtypes = (torch.float32, torch.bfloat16)
    return {str(dtype).removeprefix("torch."): matrix_rate(device, dtype, size, 0.15) / 1e9 for dtype in dtypes}


def disk(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """How fast `folder` takes a file, flushed as checkpoints are, and its room; and sentences on what is wrong."""
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".unmask-") as file:
            start = time.perf_counter()
            for _ in range(WRITTEN // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            taken = time.perf_counter() - start
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return {"folder": str(folder)}, [f"{folder}: cannot be written: {error.strerror}; runs need a folder that can"]
    facts = {"folder": str(folder), "write_mb_per_second": WRITTEN / 2**20 / taken, "free_gb": free / 2**30}
    return facts, [f"{folder}: only {free / 2**20:,.0f} MB are free: make room"] if free < ROOM else []


def advice(found: dict[str, Any]) -> list[str]:
    """What the machine could do and this installation cannot."""
    if found["used"] == "cuda":
        return []
    if any(shutil.which(program) for program in ("nvidia-smi", "rocm-smi")):
        return [f"there is a GPU's driver, but this torch is built for {found['built_for']} and sees no GPU: install "
                f"the torch build of your driver's version"]  # fmt: skip
    return []


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
