"""The log of a run as JSON lines, `<run>/log.jsonl`: one object per logged step or evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from unmask.errors import UserError
from unmask.files import parse_json, write_whole
from unmask.tracking import Record, Start

#: What is read out of a log again: a line where one of these is no number is damaged.
FIGURES = ("steps", "loss", "tokens", "tokens_per_second", "mfu", "memory", "nats_per_token", "time")


class JsonLines:
    """Appends records and flushes each. A resumed run, and one that goes back after a loss spike, first drops the lines
    written after the step it goes on from. An evaluation that is made again takes the place of the one before."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._path = Path()
        self._evaluated: set[int] = set()

    def start(self, run: Start) -> None:
        self._path = run.path / "log.jsonl"
        self._cut(lambda kind, step: step < run.step or (step == run.step and kind != "rollback"))

    def log(self, record: Record) -> None:
        assert self._file is not None, "log() before start()"
        at = record["step"]
        if record["kind"] == "rollback":
            self._cut(lambda kind, step: step <= at)
        elif record["kind"] == "evaluation":
            if at in self._evaluated:
                self._cut(lambda kind, step: step != at or kind != "evaluation")
            self._evaluated.add(at)
        finite = {key: _finite(value) for key, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def _cut(self, stays: Callable[[str, int], bool]) -> None:
        """Keep the records of which `stays(kind, step)` is true, and open the log behind them.

        A last line that a killed process left unfinished goes.
        """
        if self._file is not None:
            self._file.close()
        lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n") if self._path.exists() else []
        found = [(line, parsed(line)) for line in lines[:-1]]
        kept = [(line, record) for line, record in found if record and stays(record["kind"], record["step"])]
        self._evaluated = {record["step"] for _, record in kept if record["kind"] == "evaluation"}
        if len(kept) < len(found) or (lines and lines[-1]):
            write_whole(self._path, "".join(line + "\n" for line, _ in kept))
        self._file = self._path.open("a", encoding="utf-8")

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
        record = parsed(line)
        if record is None:
            raise UserError(
                f"{path}:{number}: not a record of a run's log; remove the line, or resume the run, which does"
            )
        while found and _again(found[-1], record["kind"], record["step"]):
            found.pop()
        found.append({key: _number(value) for key, value in record.items()})
    return found


def parsed(line: str) -> Record | None:
    """The record of a line, infinities as they are written; None for a line that is no record."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        return None
    given = [record[key] for key in FIGURES if key in record]
    return record if all(isinstance(_number(value), int | float) for value in given) else None


def reached(path: Path) -> dict[str, int]:
    """The last step of each kind of record in a log; nothing where there is no log yet."""
    return {record["kind"]: record["step"] for record in read(path)} if path.exists() else {}


def _again(record: Record, kind: str, step: int) -> bool:
    """Whether `record` is of a history that was left: a step's evaluations follow the step."""
    return record["step"] > step or (record["step"] == step and kind == "step")
