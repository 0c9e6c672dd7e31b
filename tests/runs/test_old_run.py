"""A run of an older version opens, samples and is resumed as that version did.

`old_run.tar.xz` was made at the commit that `old_run.json` names, by one process and one thread: `data`, a prepared
dataset of token ids; `run`, 6 steps of block diffusion by a Qwen3 of two layers and width 16 (fp32, AdamW, EMA),
stopped after step 4, with its checkpoints of steps 2 and 4; `weights` and `ema`, those of the same run after 6
uninterrupted steps. `old_run.json` has the losses of these and the tokens that the older version sampled: greedily, and
at temperature 1 with a threshold of 0.5 and seed 3.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unmask import Config, Trainer, load, sample
from unmask.hardware import processor

HERE = Path(__file__).parent
OLD = json.loads((HERE / "old_run.json").read_text())
#: Kernels differ between processors and versions of torch, and so does rounding; the same ones give the same bits.
NOW = {"torch": torch.__version__, "cpu": processor(), "instructions": torch.backends.cpu.get_cpu_capability()}
SAME_KERNELS = all(OLD[key] == value for key, value in NOW.items())


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The unpacked folder, as the current folder: the run's paths are relative."""
    with tarfile.open(HERE / "old_run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_as_it_was(now, then, tolerance):
    now, then = (torch.as_tensor(each, dtype=torch.float64) for each in (now, then))
    torch.testing.assert_close(now, then, rtol=0 if SAME_KERNELS else tolerance, atol=0 if SAME_KERNELS else tolerance)


@pytest.mark.parametrize("name", OLD["samples"])
def test_an_old_checkpoint_samples_the_same_tokens(old, name):
    opened = load(f"run/{name}")
    for options, tokens in zip(
        ({}, {"temperature": 1.0, "seed": 3, "threshold": 0.5}), OLD["samples"][name], strict=True
    ):
        answer = sample(opened.model, None, [1, 3, 5, 8], decoding=opened.objective.decoding, length=16, **options)
        assert answer.token == tokens


@pytest.mark.parametrize("step", [2, 4])
def test_an_old_run_is_resumed_with_the_same_losses_to_the_same_weights(old, step):
    summary = Trainer(config=Config.load("run/config.yaml", [f"checkpoint.step={step}"])).train()
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert_as_it_was(losses, OLD["losses"], 1e-6)
    for name, folder in (("weights", summary.checkpoint), ("ema", f"{summary.checkpoint}/ema")):
        now, then = dict(load(folder).model.named_parameters()), load_file(f"{name}.safetensors")
        assert now.keys() == then.keys()
        for key, weight in then.items():
            assert_as_it_was(now[key].data, weight, 1e-5)
