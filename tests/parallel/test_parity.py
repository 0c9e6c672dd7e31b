"""The same Trainer run gives the same losses, gradient norms, weights and bounds on any number of processes.

The runs are those of `tests.parallel.matrix`. Weights alone would not do: Adam hides a gradient that is a multiple of
the right one, its norm does not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.parallel.covering import AXES, candidates, pairs, shown, three
from tests.parallel.matrix import BASE, CELLS, COVER, EIGHT, EMPTY, EVALUATED, LONG, MATRIX
from tests.parallel.trainer_cases import LONG_STEPS, OBJECTIVES, Case, train

#: Of losses, norms and weights, relative to the largest of each.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def name(case):
    sizes = f"{case.replicas}x{case.blocks}" + (f"x{case.shards} zero {case.zero}" if case.zero else "")
    sizes += f" tensor {case.tensor}" if case.tensor > 1 else ""
    sizes += f" {case.schedule} {case.pipeline}" if case.pipeline > 1 else ""
    sizes += f" experts {case.experts}" if case.experts > 1 else ""
    extra = [case.dtype, case.model, case.checkpointing, str(case.batch_size // case.micro_batch), *case.options]
    return "-".join([case.objective, case.placement, case.exchange, sizes, case.data, *extra])


def row(case, always):
    return pytest.param(case, id=name(case), marks=() if always else pytest.mark.full)


@pytest.mark.parametrize("case", [row(case, case in COVER) for case in MATRIX])
def test_any_number_of_processes_is_one(case, workers, alone, tmp_path):
    ranks = workers(case.ranks).begin(train, case, str(tmp_path))
    one = alone(case)
    assert bool(one["bound"]) == (EVALUATED[0] in case.options)
    is_one(ranks(), one, case, (*KEYS, "bound", *(["routing"] if case.pipeline == 1 else [])))


KEYS = ("loss", "norm")


def is_one(ranks, one, case, keys=KEYS):
    """Every number that the ranks logged, and the weights that each ends with, are those of one process."""
    tolerance = TOLERANCE[case.dtype]
    assert len(one["loss"]) == case.steps
    for key in keys:
        close(ranks[0][key], one[key], tolerance, key)
    for ours in ranks:
        assert ours["step"] == case.steps
        close(ours["last"], one["last"], tolerance)
    for key, weight in one["weights"].items():
        close(ranks[0]["weights"][key], weight, tolerance, key)


def close(ours, wanted, tolerance, what=""):
    ours, wanted = np.asarray(ours, float), np.asarray(wanted, float)
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max(initial=0) <= tolerance * np.abs(wanted).max(initial=1e-30), what


@pytest.mark.parametrize(
    "precision, ranks, shards, stages",
    [("fp16", 2, 1, 1), ("bf16", 3, 1, 1), ("fp16", 1, 2, 1), ("bf16", 1, 2, 1), ("fp16", 1, 1, 2), ("bf16", 1, 2, 2)],
)
def test_half_precision_stays_close(precision, ranks, shards, stages, workers, alone, tmp_path):
    case = replace(BASE, dtype="float32", blocks=ranks, shards=shards, micro_batch=1 if shards * stages > 1 else 2)
    if stages > 1:
        case = replace(case, pipeline=stages, batch_size=4)
    half = replace(case, options=(f"training.precision={precision}",))
    (ours, *_), one = workers(half.ranks).run(train, half, str(tmp_path)), alone(half)
    full = alone(case)
    assert np.abs(np.array(ours["loss"]) / full["loss"] - 1).max() < 0.03
    assert np.abs(np.array(ours["loss"]) / one["loss"] - 1).max() < 0.03
    assert ours["loss"] != full["loss"]


def test_the_matrix_has_every_objective_placement_and_exchange():
    proven = {(case.objective, case.placement, case.exchange) for case in MATRIX}
    assert proven >= {(objective, *cell) for objective, cell in product(OBJECTIVES, CELLS)}
    assert len(set(MATRIX)) == len(MATRIX)


def test_every_pair_that_can_occur_is_always_run():
    """Of objective, placement, exchange, axis, data, precision and accumulation; and what the matrix shows besides."""
    covered = set().union(*map(pairs, COVER))
    assert covered >= set().union(*map(pairs, MATRIX)) | set().union(*map(pairs, candidates()))
    small = [case for case in MATRIX if case.ranks <= 4]
    assert set().union(*map(shown, COVER)) >= set().union(*map(shown, small))
    values = {value for pair in covered for value in pair}
    axes = {"blocks", "replicas", "shards", "tensor", "pipeline", "experts"}
    assert {value for kind, value in values if kind == "axis"} == axes
    # By hand: three pairs that are easily lost.
    for one, other in (
        (("exchange", "query"), ("axis", "pipeline")),
        (("objective", "mdlm (dream)"), ("axis", "tensor")),
        (("placement", "serial"), ("precision", "float32")),
    ):
        assert frozenset([one, other]) in covered
    combined = {three(case) for case in COVER if case.blocks > 1}
    assert combined >= {
        three(Case(objective, placement, exchange)) for objective, (placement, exchange) in product(OBJECTIVES, CELLS)
    }
    assert len(COVER) < 0.7 * len(MATRIX) and EIGHT[0] in COVER


def test_every_axis_has_a_long_row():
    long = [case for case in COVER if case.steps == LONG_STEPS]
    assert len(long) == len(LONG)
    assert {axis for case in long for axis in AXES if getattr(case, axis) > 1} == set(AXES)


def test_the_prompts_have_steps_without_a_label(alone):
    """Which change nothing, on any number of processes: zeros for gradients would let momentum go on."""
    assert 0.0 in alone(replace(EMPTY, steps=LONG_STEPS))["loss"]
