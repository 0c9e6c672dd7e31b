"""A run goes on exactly, whatever number of processes takes it up: the mesh is no part of what must be unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parallel.resumption import goes_on, run
from tests.parallel.trainer_cases import STEPS, Case, train
from unmask.runs import folder as layout
from unmask.runs.open import open_model

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
    "2 stages": replace(BASE, blocks=1, pipeline=2, micro_batch=1),
    "2 stages, untied": replace(BASE, blocks=1, pipeline=2, micro_batch=1, model="uneven"),
    "2 stages of 2 shards": replace(BASE, blocks=1, pipeline=2, shards=2, micro_batch=1),
    "2 tensor": replace(BASE, blocks=1, tensor=2),
    "2 tensor of 2 shards": replace(BASE, blocks=1, tensor=2, shards=2),
}
#: Averages, and means in blocks of 8 bits.
EVERYTHING = ("training.ema=0.9", "optimizer.state=8bit", "model.config.intermediate_size=128")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(ON["1"], str(tmp_path_factory.mktemp("whole")))


#: Every mesh comes before and after another; those that are `full` repeat a change of one axis.
CHANGES = [
    ("2", "1"),
    ("1", "4 blocks"),
    ("4", "2"),
    ("4 shards", "1"),
    ("2 shards", "2 replicas"),
    ("2 replicas", "2 shards of 2 copies"),
    ("2 shards of 2 copies", "2 shards of 2 blocks"),
    ("2 shards of 2 blocks", "4 blocks"),
    ("1", "2 stages"),
    ("2 stages", "2 shards"),
    ("2 shards of 2 copies", "2 stages of 2 shards"),
    ("4 shards", "2 shards"),
    ("2 tensor of 2 shards", "2 shards"),
    ("2 replicas", "2 tensor"),
    *(
        pytest.param(*change, marks=pytest.mark.full)
        for change in (
            ("2", "2 replicas"),
            ("1", "2 shards"),
            ("2 shards", "4 shards"),
            ("2 stages", "1"),
            ("2 shards", "2 shards of 2 copies"),
            ("2 tensor", "1"),
        )
    ),
]


@pytest.mark.parametrize("first, second", CHANGES)
def test_on_another_number_of_processes(first, second, workers, whole, tmp_path):
    goes_on(workers, ON[first], ON[second], whole, tmp_path)


@pytest.mark.parametrize(
    "on, dtype",
    [
        *((on, "float32") for on in ("2", "4", "2 shards", "2 shards of 2 blocks", "2 stages, untied")),
        ("2 shards", "bfloat16"),  # with fp32 masters, divided as their parameters are
    ],
)
def test_on_the_same_two_halves_are_the_whole_bit_for_bit(on, dtype, workers, tmp_path):
    case = replace(ON[on], dtype=dtype)
    whole = run(workers, case, tmp_path / "whole")
    run(workers, case, tmp_path / "halves", stop=3)
    halves = run(workers, case, tmp_path / "halves")
    assert halves["loss"] == whole["loss"] and halves["norm"] == whole["norm"]
    for name, weight in whole["weights"].items():
        assert np.array_equal(halves["weights"][name], weight), name


@pytest.mark.parametrize("first, second", [("4 shards", "1"), ("2 shards of 2 blocks", "2 shards")])
def test_averages_and_means_in_blocks_go_along(first, second, workers, tmp_path):
    before, after, alone = (replace(ON[on], options=EVERYTHING) for on in (first, second, "1"))
    run(workers, before, tmp_path / "parts", stop=3)
    rest, whole = run(workers, after, tmp_path / "parts"), train(alone, str(tmp_path / "whole"))
    np.testing.assert_allclose(rest["loss"], whole["loss"], rtol=1e-10, atol=1e-10)
    for name, average in averages(tmp_path / "whole").items():
        np.testing.assert_allclose(averages(tmp_path / "parts")[name], average, rtol=1e-10, atol=1e-10)


def averages(path):
    model = open_model(path / "ema").model
    return {name: weight.detach().numpy() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("first, second", [("4 shards", "2 replicas"), ("1", "2 shards")])
def test_the_loss_scale_goes_along(first, second, workers, tmp_path):
    """Counted over all steps, as it is on one mesh."""
    before, after = (replace(ON[on], dtype="float32", options=("training.precision=fp16",)) for on in (first, second))
    run(workers, before, tmp_path, stop=3)
    run(workers, after, tmp_path)
    state = layout.state_of(layout.step_folder(tmp_path, STEPS))["scaler"]
    assert (state["_growth_tracker"], state["scale"]) == (STEPS, 2.0**16)
