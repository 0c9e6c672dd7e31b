"""Everything the trainer does besides steps gives the same on several processes: averages, rollbacks, best checkpoints,
schedules, the loss by level, the bounds of several sets; the noise scale is measured by replicas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel.trainer_cases import documents
from tests.parallel.training_cases import everything, first_noise, full_disk
from tests.training.tiny import train
from unmask.runs.folder import saved_steps
from unmask.training.source import micro_batches

MESHES = {
    "2 blocks": (2, ["parallel.block_parallel_size=2", "training.micro_batch=2"]),
    "2 shards": (2, ["parallel.shard_size=2", "training.micro_batch=2"]),
    "2 replicas": (2, ["parallel.data_parallel_size=2", "training.micro_batch=2"]),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    return everything(str(path), []), path


@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_numbers_as_alone(mesh, workers, alone, tmp_path):
    whole, path = alone
    ranks, options = MESHES[mesh]
    first, *others = workers(ranks).run(everything, str(tmp_path), options)
    assert [each["state"][:2] for each in (whole, first, *others)] == [(2, 1)] * (ranks + 1)
    assert whole["state"][2][0] == first["state"][2][0] == others[0]["state"][2][0]
    assert [record["kind"] for record in first["log"]] == [record["kind"] for record in whole["log"]]
    assert sum(record["kind"] == "rollback" for record in whole["log"]) == 1
    for ours, theirs in zip(first["log"], whole["log"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == (value if isinstance(value, bool | str) else pytest.approx(value, rel=1e-9)), key
    for part in ("ema", "weights"):
        for each in (first, *others):
            for name, value in whole[part].items():
                np.testing.assert_allclose(each[part][name], value, rtol=1e-9, atol=1e-9)
    assert saved_steps(tmp_path) == saved_steps(path)
    assert (tmp_path / "best").readlink() == (path / "best").readlink()
    assert first["profile"] == [f"trace-rank-{rank}.json" for rank in range(ranks)]


def test_a_run_of_two_processes_resumes_on_one(workers, alone, tmp_path):
    """Stopped after the rollback; averages, offset and best go on exactly."""
    whole, _ = alone
    workers(2).run(everything, str(tmp_path), MESHES["2 replicas"][1], 7)
    rest = everything(str(tmp_path), [])
    assert rest["state"][:2] == whole["state"][:2] and rest["state"][2][0] == whole["state"][2][0]
    for part in ("ema", "weights"):
        for name, value in whole[part].items():
            np.testing.assert_allclose(rest[part][name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "batch_size, samples",
    [
        (2, [0, 1]),  # a micro-batch each: what they put into the sum
        (4, [0, 1]),  # two each: their first ones
        (3, [0]),  # two and one: the first of the one that has two
    ],
)
def test_replicas_measure_the_noise_scale(batch_size, samples, workers, tmp_path):
    options = [f"training.batch_size={batch_size}", "data.pack_tokens=32"]
    found = workers(2).run(first_noise, str(tmp_path / "two"), [*options, "parallel.data_parallel_size=2"])
    frozen = [*options, "model.dtype=float64", "training.steps=1", "optimizer.learning_rate=1e-300"]
    trainer = train(tmp_path / "one", *frozen, data=documents("packed"))
    micro = micro_batches(trainer.objective.at(0, 1), trainer.run.source.sampler.batch(0), 0, 1)
    count, model = sum(rows.count for rows in micro), trainer.engine.row_model
    squares = []
    for rows in micro:
        model.zero_grad()
        batch = model.collate(rows)
        (model(batch, trainer.objective).sum / count).backward()
        squares.append(sum(float(p.grad.square().sum()) for p in model.parameters()))
    expected = batch_size**2 * np.mean([squares[n] for n in samples])
    for part, parts in found:
        assert parts == batch_size and part == pytest.approx(expected, rel=1e-9)


def test_a_disk_that_fills_behind_the_back_of_two_processes(workers, tmp_path):
    said = workers(2).run(full_disk, str(tmp_path))
    assert said[0] == said[1] and "No space left on device; there is no earlier checkpoint" in said[0]
    assert saved_steps(tmp_path) == []
