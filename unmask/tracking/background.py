"""A tracker in a thread of its own: the training neither waits for it nor ends with it.

Everything passes through a queue, the start too: a server that does not answer holds up no step. The first exception
ends the tracker and is told once; what it had not written is in the log, from which a tracker that follows it catches
up when the run goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from unmask.tracking import Record, Start, Tracker

#: Seconds that the end of a run waits for what is still to be written.
PATIENCE = 60.0


class Background:
    """`tracker` under its `name`; `warn` is told, from the training's thread, when it fails."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]):
        self.name, self.tracker, self.warn = name, tracker, warn
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False

    def start(self, run: Start) -> None:
        self._error, self._told = None, False
        self._queue = SimpleQueue()
        self._queue.put(lambda: self.tracker.start(run))
        self._thread = threading.Thread(target=self._work, name=f"unmask-{self.name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        self._tell()
        if self._error is None:
            kept = dict(record)  # callbacks may change the record that they are given
            self._queue.put(lambda: self.tracker.log(kept))

    def message(self, text: str) -> None:
        if self._error is None:
            self._queue.put(lambda: self.tracker.message(text))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(self.tracker.close)
            self._queue.put(None)
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self._error = TimeoutError(f"no answer for {PATIENCE:g} s")
            self._thread = None
        self._tell()

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                action()
            except Exception as error:
                self._error = error

    def _tell(self) -> None:
        if self._error is None or self._told:
            return
        self._told = True
        lines = str(self._error).strip().splitlines()
        why = f"{type(self._error).__name__}: {lines[0]}" if lines else type(self._error).__name__
        self.warn(f"the tracker {self.name} failed and is switched off ({why}); the log continues")
