"""What is told of a run while it goes on: records for its trackers, sentences for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unmask import tracking
from unmask.config import LogConfig
from unmask.parallel.mesh import Mesh
from unmask.processes import launched
from unmask.tracking import Record, Start, Tracker
from unmask.tracking.console import ConsoleTracker


class Journal:
    """The trackers of a run, which its first process has and the others lack."""

    def __init__(self, config: LogConfig, mesh: Mesh):
        self._trackers: list[Tracker] = tracking.build(config, self.message) if mesh.first else []

    @contextmanager
    def open(self, start: Start) -> Iterator[None]:
        try:
            for tracker in self._trackers:
                tracker.start(start)
            yield
        finally:
            for tracker in self._trackers:
                tracker.close()

    def log(self, kind: str, step: int, steps: int, **columns: object) -> Record:
        """Write a record, and return it."""
        record = {"kind": kind, "step": step, "steps": steps, **columns, "time": time.time()}
        for tracker in self._trackers:
            tracker.log(record)
        return record

    def restart(self, step: int, steps: int, reason: str) -> None:
        """That a launcher has started the run again by itself, of which it has told the user; else nothing."""
        restarts, limit = launched.restarts()
        if restarts:
            self.log("restart", step, steps, restarts=restarts, limit=limit, reason=reason)

    def message(self, text: str) -> None:
        """A sentence for whoever watches the run."""
        for tracker in self._trackers:
            tracker.message(text)

    def header(self, lines: Sequence[str]) -> None:
        """Sentences for the console alone."""
        for tracker in self._trackers:
            for line in lines if isinstance(tracker, ConsoleTracker) else ():
                tracker.message(line)
