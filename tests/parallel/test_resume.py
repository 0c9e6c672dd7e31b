"""A run goes on exactly, whatever number of processes takes it up: the mesh is no part of what must be unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parallel.trainer_cases import STEPS, Case, train

BASE = Case("block_diffusion (bd3lm)", "csbp", batch_size=4, micro_batch=2)
ON = {
    "1": BASE.alone(),
    "2": BASE,
    "2 replicas": replace(BASE, placement="auto", blocks=1, replicas=2),
    "4": replace(BASE, blocks=2, replicas=2),
    "4 blocks": replace(BASE, blocks=4),
    "2 shards": replace(BASE, blocks=1, shards=2),
    "4 shards": replace(BASE, blocks=1, shards=4, micro_batch=1, zero=2),
    "2 shards of 2 copies": replace(BASE, blocks=1, shards=2, replicas=2, micro_batch=1),
    "2 shards of 2 blocks": replace(BASE, shards=2),
    "2 tensor": replace(BASE, blocks=1, tensor=2),
    "2 tensor of 2 shards": replace(BASE, blocks=1, tensor=2, shards=2),
}
#: Averages, a loss scale that has moved, and means in blocks of 8 bits (of fp32 weights, as fp16 needs).
EVERYTHING = ("training.ema=0.9", "optimizer.state=8bit", "model.config.intermediate_size=128", "optimizer.eps=1e-4")


def run(workers, case, path, stop=None):
    if case.ranks == 1:
        return train(case, str(path), stop)
    return workers(case.ranks).run(train, case, str(path), stop)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(ON["1"], str(tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize(
    "first, second",
    [
        ("2", "1"),
        ("1", "4 blocks"),
        ("4", "2"),
        ("2", "2 replicas"),
        ("4 shards", "1"),
        ("1", "2 shards"),
        ("2 shards", "4 shards"),
        ("2 shards", "2 replicas"),
        ("2 replicas", "2 shards of 2 copies"),
        ("2 shards of 2 copies", "2 shards of 2 blocks"),
        ("2 shards of 2 blocks", "4 blocks"),
        ("4 shards", "2 shards"),
        ("2 shards", "2 shards of 2 copies"),
        ("2 tensor of 2 shards", "2 shards"),
        ("2 replicas", "2 tensor"),
        ("2 tensor", "1"),
    ],
)
def test_on_another_number_of_processes(first, second, workers, whole, tmp_path):
    assert run(workers, ON[first], tmp_path, stop=5)["step"] == 5
    rest = run(workers, ON[second], tmp_path)
    assert rest["step"] == len(rest["loss"]) == STEPS
    for key in ("loss", "norm"):
        np.testing.assert_allclose(rest[key], whole[key], rtol=1e-10, atol=1e-10)
    for name, weight in whole["weights"].items():
        np.testing.assert_allclose(rest["weights"][name], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize("on", ["2", "4", "2 shards", "2 shards of 2 blocks"])
def test_on_the_same_ten_and_ten_are_twenty_bit_for_bit(on, dtype, workers, tmp_path):
    case = replace(ON[on], dtype=dtype)
    twenty = run(workers, case, tmp_path / "twenty")
    run(workers, case, tmp_path / "halves", stop=10)
    halves = run(workers, case, tmp_path / "halves")
    assert halves["loss"] == twenty["loss"] and halves["norm"] == twenty["norm"]
    for name, weight in twenty["weights"].items():
        assert np.array_equal(halves["weights"][name], weight), name
