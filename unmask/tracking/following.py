"""What the adapters share: a tracker that follows the log, so that what it shows is what `log.jsonl` holds.

When a run starts or goes on, the log is the truth: an adapter says up to where its own copy reaches, is given what it
lacks, and skips what it has (an exact resume repeats it to the bit). So no step is there twice, none is missing after a
crash, and a tracker that is named later gets the whole history. A run that starts over, or goes back
(`checkpoint.step`, a loss spike), becomes a new run of the tracker.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from unmask.config import Section
from unmask.errors import UserError
from unmask.files import read_json, write_whole
from unmask.tracking import Record, Start
from unmask.tracking.jsonl import read

#: In a run's folder: the tracker's name -> the id of this run there.
IDENTITIES = "trackers.json"
HINT = "remove it, and the trackers make new runs"
#: Of a record, what places its numbers rather than being one.
PLACES = ("kind", "step", "steps", "time")
#: How the two kinds of records are told apart in a tracker.
PREFIX = {"step": "train", "evaluation": "validation"}


class Following(ABC):
    """A tracker made from its options. A subclass names the package it needs, opens the tracker's run and writes."""

    Options: ClassVar[type[Section]]
    #: The module that must be there, and the extra of this package that installs it.
    package: ClassVar[str]

    def __init__(self, options: Any):
        self.options = options
        spec = find_spec(self.package)
        # Without an origin it is a folder of that name, such as the `wandb` that W&B itself leaves behind.
        if spec is None or spec.origin is None:
            raise UserError(
                f"log.trackers: {self.package} is not installed: pip install 'unmask[{self.package}]', or leave it out"
            )
        self._reached: dict[str, int] = {}

    def start(self, run: Start) -> None:
        self._run_at = run
        self._follow(run, run.step == 0 or run.config.get("checkpoint", {}).get("step") is not None)

    def log(self, record: Record) -> None:
        if record["kind"] == "rollback":
            self.close()
            self._follow(replace(self._run_at, step=record["step"]), True)
        else:
            self._take(record)

    def _follow(self, run: Start, anew: bool) -> None:
        """Open the tracker's run, another one if `anew`, and bring it up to the log."""
        self._reached = self.open(run, anew)
        for record in read(run.path / "log.jsonl"):
            self._take(record)

    def _take(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        if kind in PREFIX and step > self._reached.get(kind, -1):
            self._reached[kind] = step
            self.write(step, numbers(record), record.get("time"))

    def message(self, text: str) -> None:
        """Sentences are for the console."""
        return

    @abstractmethod
    def open(self, run: Start, anew: bool) -> dict[str, int]:
        """Make the tracker's run, or take it up again; returns the last step it has of each kind of record.

        anew: the numbers of later steps that the tracker may have are of a history that was left.
        """

    @abstractmethod
    def write(self, step: int, numbers: dict[str, float], time: float | None) -> None:
        """Write the numbers of a step, of which there may be two kinds; time: in seconds since the epoch."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left, and end the tracker's run."""


def identity(run: Start, tracker: str, anew: bool) -> tuple[str, bool]:
    """(id of the run in `tracker`, whether it was there before), kept in the run's folder; `anew` gives another."""
    file = run.path / IDENTITIES
    known = _known(file)
    if tracker in known and not anew:
        return known[tracker], True
    made = secrets.token_hex(8)
    keep(file, tracker, made)
    return made, False


def keep(file: Path, name: str, identity: str) -> None:
    """Write one more identity, all or nothing."""
    write_whole(file, json.dumps(_known(file) | {name: identity}, indent=1))


def _known(file: Path) -> dict[str, str]:
    """Those that a run's folder holds; UserError for a damaged file."""
    known = read_json(file, HINT) if file.exists() else {}
    if not all(isinstance(identity, str) for identity in known.values()):
        raise UserError(f"{file}: gives no identity by tracker; {HINT}")
    return known


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record by name: `train/loss`, `validation/nats_per_token`, `rank 1/train/memory`.

    Truth values become 0 and 1, what is not known is left out.
    """
    prefix = PREFIX.get(record["kind"], record["kind"])
    found: dict[str, float] = {}
    for key, value in record.items():
        if key.startswith("rank_") and isinstance(value, list):
            for rank, each in enumerate(value):
                found |= _named(f"rank {rank}/{key.removeprefix('rank_')}", each)
        elif key not in PLACES:
            found |= _named(f"{prefix}/{key}", value)
    return found


def _named(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {key: number for part, each in value.items() for key, number in _named(f"{name} {part}", each).items()}
    if isinstance(value, list):
        return {key: number for at, each in enumerate(value) for key, number in _named(f"{name} {at}", each).items()}
    return {name: float(value)} if isinstance(value, int | float) else {}
