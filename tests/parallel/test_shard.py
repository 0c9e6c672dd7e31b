"""A divided model: what each rank holds is what the dry run says, what it sends is what the level of ZeRO says."""

from __future__ import annotations

import pytest

from tests.parallel.shard_cases import held, named
from tests.parallel.trainer_cases import Case, documents
from tests.training.tiny import config
from unmask.config import ParallelConfig
from unmask.planning.dry_run import plan
from unmask.training import setup

CASE = {"placement": "auto", "exchange": "auto", "batch_size": 4, "micro_batch": 1}


@pytest.mark.parametrize(
    "sizes, level, micro",
    [({"shards": 2}, 3, 2), ({"shards": 2}, 1, 2), ({"shards": 2, "replicas": 2}, 2, 1), ({"shards": 3}, 2, 2)],
)
def test_memory_is_foretold_to_the_byte_and_traffic_follows_the_level(
    sizes, level, micro, workers, tmp_path, monkeypatch
):
    case = Case("mdlm (llada)", blocks=1, zero=level, **{**CASE, **sizes})
    found = workers(case.ranks).run(held, case, str(tmp_path / "run"))
    facts = promised(case, tmp_path / "dry", monkeypatch)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        # Of an odd number of rows the first rank holds the most.
        assert max(each[name] for each in found) == facts[name], name
    part, shards, copies = facts["gradient_bytes"], case.shards, case.replicas
    layers = part - root_part(shards)
    gathers = {1: part, 2: micro * part, 3: micro * (part + layers)}[level]
    sums = 1 if level == 1 else micro
    for sent in found[0]["sent"]:
        assert sent["parameters"] == (shards - 1) * gathers
        assert sent["parameter gradients"] == sums * (shards - 1) * part + 2 * (copies - 1) * part // copies


def root_part(shards):
    """Bytes of a part of the tied embeddings and the last norm."""
    return sum(-(-rows // shards) * width * 8 for rows, width in ((64, 32), (32, 1)))


def promised(case, path, monkeypatch):
    settings = config(path, *case.overrides(), **named(case))
    original = setup.prepare
    monkeypatch.setattr(setup, "prepare", lambda settings: original(settings, documents(case.data)))
    return plan(settings)


def test_levels():
    assert ParallelConfig().level == ParallelConfig(block_parallel_size=2).level == 0
    assert ParallelConfig(shard_size=2).level == 3 and ParallelConfig(shard_size=2, zero=1).level == 1
    assert ParallelConfig(block_parallel_size=2, zero=2).level == 2
    assert ParallelConfig(shard_size=2, block_parallel_size=2).shards == 4
    assert ParallelConfig(data_parallel_size=2).shards == 1
