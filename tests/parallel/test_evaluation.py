"""`evaluate` on several processes: each takes its share of the packs, and all return the numbers of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.training.tiny import documents, train

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ar": {"name": "ar"},
    "mdlm": {"name": "mdlm"},
    "block_diffusion": {"name": "block_diffusion", "block_size": 8},
}


def evaluated(folder: str, name: str) -> tuple[list[dict[str, Any]], int]:
    """(what two sets gave, packs that this process ran)."""
    from unmask.evaluation import evaluate_sets
    from unmask.models import RowModel

    ran: list[int] = []
    sets = {"first": f"{folder}/first.jsonl", "second": f"{folder}/second.jsonl"}
    collate = RowModel.collate
    with mock.patch.object(RowModel, "collate", lambda self, rows: ran.append(1) or collate(self, rows)):
        found = evaluate_sets(f"{folder}/{name}", sets, draws=2, packs=5, pack_tokens=64, seed=3)
    return [one.asdict(4 if name != "ar" else 0) for one in found.values()], len(ran)


def numbers(found: Any) -> list[float]:
    """Every number in nested lists and dicts, in order."""
    if isinstance(found, dict | list):
        return [number for one in (found.values() if isinstance(found, dict) else found) for number in numbers(one)]
    return [] if found is None else [found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    for name, records in (("first", documents(30, seed=1)), ("second", documents(9, seed=2))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_number_of_processes_gives_the_same_numbers(name, workers, folder):
    train(folder / name, "model.dtype=float64", "training.steps=1", objective=OBJECTIVES[name])
    alone, packs = evaluated(str(folder), name)
    assert packs == 10
    for ranks in (2, 4):
        answers = workers(ranks).run(evaluated, str(folder), name)
        assert all(found == answers[0][0] for found, _ in answers)
        assert numbers(answers[0][0]) == pytest.approx(numbers(alone), rel=1e-12)
        assert [count for _, count in answers] == [2 * -(-5 // ranks)] * ranks
