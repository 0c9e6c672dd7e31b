"""The progress of `unmask prepare` off a terminal: lines with a share, a count and an ETA, but not too many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unmask.cli import progress as module


def test_plain_lines_carry_an_eta(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 4.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with module.reading() as report:
        for read in (100, 300, 400, 600):
            report(read, 1200, read // 10)
    assert capsys.readouterr().err.splitlines() == [
        "25% read, 30 documents, ETA 0:00:36",
        "50% read, 60 documents, ETA 0:00:30",
    ]


def test_plain_lines_of_a_task_in_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 4.0, 12.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with module.steps("evaluating", "packs") as report:
        for done in (1, 3):
            report(done, 12)
    assert capsys.readouterr().err.splitlines() == ["evaluating: 3 of 12 packs, ETA 0:00:36"]
