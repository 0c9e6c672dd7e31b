"""SIGTERM and Ctrl-C end a run after the step in progress; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from unmask.endings import CAUGHT
from unmask.processes import launched


class Interrupt:
    """Within `with Interrupt() as interrupt:`, `interrupt.signal` is the number of the signal received, or None.

    Outside the main thread Python cannot catch signals, and the block changes nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            launched.BEGUN.set()
            self._before = {number: signal.signal(number, self._receive) for number in CAUGHT}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.signal = number
