"""Runs with a loss on the clean stream, and with annealed attention, give one process's numbers on several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.test_parity import is_one, name
from tests.parallel.trainer_cases import HYBRIDS, Case, train

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
