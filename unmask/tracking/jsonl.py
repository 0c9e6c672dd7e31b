"""The log of a run as JSON lines, `<run>/log.jsonl`: one object per logged step or evaluation."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TextIO

from unmask.errors import UserError
from unmask.tracking import Record, Start


class JsonLines:
    """Appends records and flushes each. A resumed run, and one that goes back after a loss spike, first drops the lines
    written after the step it goes on from."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: Start) -> None:
        path = run.path / "log.jsonl"
        if path.exists():
            truncate(path, run.step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: Record) -> None:
        assert self._file is not None, "log() before start()"
        if record["kind"] == "rollback":
            path = Path(self._file.name)
            self._file.close()
            truncate(path, record["step"], ("evaluation",))
            self._file = path.open("a", encoding="utf-8")
        finite = {key: _finite(value) for key, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def message(self, text: str) -> None:
        """Sentences are for the console."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _finite(value: object) -> object:
    """JSON has no infinities: they are written as the strings "inf", "-inf" and "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: object) -> object:
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value


def read(path: Path) -> list[Record]:
    """The records of a log, which may be one that is still written to.

    A last line that is not finished is left out, and where steps were trained again the later records count. UserError
    for a file that is not there, and for any other line that is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such log") from None
    found: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or number == len(lines):  # a line is finished by its newline
            continue
        try:
            record: Record = {key: _number(value) for key, value in json.loads(line).items()}
            kind, step = record["kind"], int(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}:{number}: not a record of a run's log") from None
        while found and _again(found[-1], kind, step):
            found.pop()
        found.append(record)
    return found


def reached(path: Path) -> dict[str, int]:
    """The last step of each kind of record in a log; nothing where there is no log yet."""
    return {record["kind"]: record["step"] for record in read(path)} if path.exists() else {}


def _again(record: Record, kind: str, step: int) -> bool:
    """Whether `record` is of a history that was left: a step's evaluations follow the step."""
    return record["step"] > step or (record["step"] == step and kind == "step")


def truncate(path: Path, step: int, kinds: tuple[str, ...] = ("evaluation", "rollback")) -> None:
    """Drop what a run that goes on after `step` will write again: later steps, and from `step` on records of `kinds`.

    A last line that a killed process left unfinished goes too.
    """
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step - (record["kind"] in kinds):
            kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
