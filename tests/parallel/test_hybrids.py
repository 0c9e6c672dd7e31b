"""Runs with a loss on the clean stream, annealed attention or a loss of their own give the numbers of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.matrix import EVALUATED
from tests.parallel.test_parity import KEYS, is_one, name
from tests.parallel.trainer_cases import HYBRIDS, OWN_LOSSES, Case, train

BASE = Case("i_dlm", "csbp", "auto")
SMOOTH = {"dtype": "float32", "options": ("optimizer.eps=1e-4",)}
CASES = [
    replace(BASE, data="prompt"),
    replace(BASE, objective="nemotron", blocks=3, exchange="ring", data="long"),
    replace(BASE, objective="annealed", placement="context", exchange="needed", blocks=2),
    replace(BASE, objective="i_dlm", blocks=1, shards=2, batch_size=4, micro_batch=1, **SMOOTH),
    replace(BASE, objective="nemotron", exchange="query", **SMOOTH),
]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_any_number_of_processes_is_one(case, workers, alone, tmp_path):
    assert case.objective in HYBRIDS
    is_one(workers(case.ranks).run(train, case, str(tmp_path)), alone(case), case)


#: Columns go where labels go: over placements, micro-batches (also of nothing, on two of three ranks) and stages.
CLIPPED = Case("clipped", blocks=1, batch_size=4, micro_batch=1, data="prompt", steps=4, options=EVALUATED)
#: Fast, for the term is of tokens that are predicted right already.
CONFIDENCE = replace(CLIPPED, objective="confidence", data="packed", steps=6, options=("optimizer.learning_rate=0.05",))
PLAIN = {"confidence": "block_diffusion (llada2)", "clipped": "block_diffusion (bd3lm)"}
LOSSES = [
    replace(CLIPPED, blocks=2, placement="csbp"),
    replace(CLIPPED, blocks=2, placement="block", micro_batch=2),
    replace(CLIPPED, blocks=2, placement="context"),
    replace(CLIPPED, shards=3),
    replace(CLIPPED, shards=2, tensor=2),
    replace(CLIPPED, pipeline=2, tensor=2),
    replace(CONFIDENCE, shards=2, tensor=2),
]


@pytest.mark.parametrize("case", LOSSES, ids=name)
def test_a_loss_over_columns_or_logits_is_one_process_s(case, workers, alone, tmp_path):
    assert case.objective in OWN_LOSSES
    one = alone(case)
    assert bool(one["bound"]) == (case.options == EVALUATED)
    assert one["loss"][-2:] != alone(replace(case, objective=PLAIN[case.objective]))["loss"][-2:]
    assert all(one["surprise"]) == (case.objective == "clipped")
    is_one(workers(case.ranks).run(train, case, str(tmp_path)), one, case, (*KEYS, "bound", "surprise"))
