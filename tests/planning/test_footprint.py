"""The memory that a dry run foretells, against what a run of the same config takes in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.tiny import MODEL, config, documents
from unmask.planning.footprint import Ledger, footprint
from unmask.training import setup
from unmask.training.source import micro_batches

WIDE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "vocab_size": 4096, "num_hidden_layers": 3}
PROGRAM = """
import json, sys
import numpy as np
from unmask import Config, Trainer
from unmask.planning.dry_run import plan
settings = Config.parse(json.loads(sys.argv[1]), "test")
if sys.argv[2] == "plan":
    print(json.dumps(plan(settings)))
else:
    Trainer(config=settings).train()
    # Not getrusage's maximum: a program begins with that of the process that started it.
    high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps({"memory": 1024 * int(high.split()[1])}))
"""


def prepared(path, *overrides, objective=None):
    run = setup.prepare(config(path, *overrides, objective=objective), documents())
    batch, training = run.source.documents(0), run.config.training
    return run, micro_batches(run.objective.at(0, run.steps), batch, training.seed, training.micro_batch)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_parameters_gradients_and_optimiser_state_are_counted_to_the_byte(tmp_path):
    run, micro = prepared(tmp_path)
    weights = bytes_of(run.model.parameters())
    buffers = bytes_of(run.model.buffers())
    found = footprint(run, micro)
    assert (found.parameters, found.gradients, found.optimizer) == (weights + buffers, weights, 2 * weights)
    assert found.peak == sum(vars(found).values()) and found.host == 0
    assert all(type(parameter.data) is torch.Tensor for parameter in run.model.parameters())  # none fake any more


def test_what_is_offloaded_is_not_on_the_device(tmp_path):
    """Half of the parameters, their gradients, AdamW's two means and the averages, in the CPU's memory."""
    settings = ["parallel.shard_size=2", "training.ema=0.9"]
    run, micro = prepared(tmp_path, *settings)
    kept = footprint(run, micro)
    run, micro = prepared(tmp_path, *settings)
    run.config.parallel.offload = True  # on a CPU it is refused
    moved = footprint(run, micro)
    own = sum(-(-len(each) // 2) * each[0].numel() * each.element_size() for each in run.model.parameters())
    assert moved.host == 5 * own and moved.parameters == kept.parameters
    assert (kept.peak - kept.process) - (moved.peak - moved.process) == moved.host


def test_checkpointing_and_precision_are_in_it(tmp_path):
    def activations(*overrides):
        sizes = ["model.config.num_hidden_layers=6", "data.pack_tokens=512", "training.batch_size=1"]
        return footprint(*prepared(tmp_path, *sizes, *overrides)).activations

    plain = activations()
    full, selective, mlp = (activations(f"training.checkpointing={mode}") for mode in ("full", "selective", "mlp"))
    assert full < selective < mlp < plain
    assert activations("training.precision=bf16") < plain


def test_the_ledger_counts_what_lives_and_only_while_it_lives():
    ledger = Ledger()
    with ledger:
        first = torch.zeros(1000)
        view = first[:10]
        assert ledger.live == 4000
        second = first + 1
        del first
        assert ledger.live == 8000 and view.numel() == 10
        del view, second
    assert (ledger.live, ledger.peak) == (0, 8000)


def test_an_optimiser_that_reads_values_is_not_foretold(tmp_path):
    from unmask.engine.optim.optimizers import optimizers

    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            if float(self.param_groups[0]["params"][0].detach().sum()) > 0:
                super().step(closure)

    optimizers.add("reading", lambda parameters, config: Reading(parameters, lr=config.learning_rate))
    assert footprint(*prepared(tmp_path, "optimizer.name=reading")) is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak")
def test_the_peak_is_what_a_run_takes(tmp_path):
    with (tmp_path / "data.jsonl").open("w") as file:
        for first in range(16):
            file.write(json.dumps({"input_ids": [(first + at * at) % 4000 for at in range(2048)]}) + "\n")
    tree = {
        "model": {"config": {**MODEL, **WIDE}, "mask_token_id": 4095},
        "data": {"train": str(tmp_path / "data.jsonl"), "pack_tokens": 2048},
        "objective": {"name": "block_diffusion", "block_size": 32},
        "training": {"steps": 3, "threads": 1},
        "checkpoint": {"path": str(tmp_path / "run")},
        "log": {"console": "none"},
    }
    answers = {}
    for what in ("plan", "train"):
        command = [sys.executable, "-c", PROGRAM, json.dumps(tree), what]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        answers |= json.loads(done.stdout)
    assert answers["peak_bytes"] == pytest.approx(answers["memory"], rel=0.25)
