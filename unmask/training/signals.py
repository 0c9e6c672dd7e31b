"""SIGTERM and Ctrl-C end a run after the step in progress; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from unmask.endings import CAUGHT
from unmask.parallel.mesh import Mesh
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


class Ending(Interrupt):
    """Why a run ends before its last step: a signal, or somebody's `stop`. `with ending:` signals are caught.

    number: of the signal. Processes agree, after the same step of all.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.stop = False
        self.number: int | None = None

    def agree(self, failed: bool) -> bool:
        """Take up what the other processes have heard; returns whether one of them has `failed`."""
        mine = [float(self.stop), float(self.signal or 0), float(failed)]
        stop, number, failure = self.mesh.largest(mine)
        self.stop, self.number = bool(stop), int(number) or None
        return bool(failure)

    @property
    def near(self) -> bool:
        """Whether the run ends now; of one process at once."""
        if self.mesh.size == 1:
            self.number = self.signal
        return self.stop or self.number is not None
