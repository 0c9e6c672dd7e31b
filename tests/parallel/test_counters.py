"""What the log counts is what the placement and the formulas promise, to the byte."""

import pytest

from tests.parallel.trainer_cases import Case, documents
from tests.training.tiny import config, log
from unmask.blocks.axis import Layers
from unmask.planning.dry_run import plan
from unmask.training.trainer import Trainer

KINDS = {"keys and values", "queries", "partial results", "gradients"}


def overrides(case):
    """A last layer that skips rows is never computed twice: under full checkpointing it would not count like others."""
    return [*case.overrides(), "training.steps=1", f"model.skip_last_layer={str(case.checkpointing != 'full').lower()}"]


def first_step(case, path):
    from pathlib import Path

    settings = config(Path(path), *overrides(case))
    trainer = Trainer(config=settings)
    trainer.train(documents(case.data))
    size = sum(parameter.numel() * parameter.element_size() for parameter in trainer.run.model.parameters())
    return (log(Path(path))[-1] if trainer.mesh.first else None), size


def promised(case, path, monkeypatch):
    """The dry run's facts of the same step, made on one process."""
    settings = config(path, *overrides(case))
    prepare = "unmask.training.setup.prepare"
    from unmask.training import setup

    original = setup.prepare
    monkeypatch.setattr(prepare, lambda settings: original(settings, documents(case.data)))
    return plan(settings)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "placement, exchange, ranks",
    [
        ("csbp", "auto", 2),
        ("csbp", "needed", 3),
        ("context", "ring", 3),
        ("context", "gather", 4),
        ("block", "auto", 3),
    ],
)
def test_the_log_and_the_dry_run_agree(placement, exchange, ranks, checkpointing, workers, tmp_path, monkeypatch):
    case = Case("block_diffusion (bd3lm)", placement, exchange, ranks, checkpointing=checkpointing, data="packed")
    (record, size), *_ = workers(ranks).run(first_step, case, str(tmp_path / "run"))
    facts = promised(case, tmp_path / "dry", monkeypatch)
    assert record["rank_rows"] == facts["rank_rows"]
    assert record["rank_pairs"] == facts["rank_pairs"]
    forward, backward = facts["rank_bytes_forward"], facts["rank_bytes_backward"]
    # Selective checkpointing keeps what attention returned: nothing is exchanged twice.
    passes = 2 if checkpointing == "full" else 1
    sent = [sum(size for kind, size in kinds.items() if kind in KINDS) for kinds in record["rank_sent"]]
    assert sent == [passes * there + back for there, back in zip(forward, backward, strict=True)]
    assert {kinds["parameter gradients"] for kinds in record["rank_sent"]} == {2 * (ranks - 1) * size // ranks}
    assert all(waited >= 0 for waited in record["rank_waited"]) and len(record["rank_memory"]) == ranks


def test_a_layer_with_labelled_queries_counts_as_the_last():
    from unmask.blocks.exchange import Widths
    from unmask.rows import Shape

    layers = Layers(Shape(1, 1, 8, (None, 4, 4), skips=True), Widths(2, 1, 4))
    assert layers.kinds == [(None, False), (4, False), (4, True)]
