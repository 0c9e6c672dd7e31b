"""What a signal makes of a program: it ends with one line and 128 + the signal's number, at whatever moment it came.

Python hears a signal between two of its own instructions and raises an exception there, through every `finally`. Three
things stand in the way, and are dealt with here: nobody catches it while the program is still being imported; a library
that catches everything passes another exception on (torch's DCP does); and a rank that waits for others inside a
collective executes no Python at all.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: What a user or a scheduler ends a program with.
CAUGHT = (signal.SIGTERM, signal.SIGINT)
#: Seconds until a rank that cannot hear a signal is ended where it stands.
DEAF = 5.0


def sentence(number: int) -> str:
    """What is said of a program that the signal `number` has ended."""
    return f"unmask: ended by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"


@contextmanager
def at_once() -> Iterator[None]:
    """While the program is being imported there is nothing to clear up: a signal ends it where it stands.

    So does, without a word, another one after the block, while the interpreter takes itself apart.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        _leave(number)

    with _handled(leave, lambda number, frame: os._exit(128 + number)):
        yield


class Ending:
    """Within `with Ending() as ending:` a signal raises KeyboardInterrupt or SystemExit; ending.number remembers which.

    A second SIGTERM is ignored: it must not interrupt the clearing up. deaf: whether this process may be waiting where
    no signal is heard; once it has been for DEAF seconds it is ended, unless `begun()`: a run in progress answers
    signals itself, between its steps.
    """

    def __init__(self, deaf: bool = False, begun: Callable[[], bool] = lambda: False):
        self.number: int | None = None
        self._deaf, self._begun = deaf, begun

    @contextmanager
    def watching(self) -> Iterator[Ending]:
        """The block in which it does so."""
        hook = sys.unraisablehook
        with _handled(self._receive):
            if self._deaf:
                self._listen()
            try:
                yield self
            finally:
                sys.unraisablehook = hook

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        # In a destructor, where the exception cannot pass, Python would print it.
        sys.unraisablehook = lambda unraisable: None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    def _listen(self) -> None:
        """Hear signals in a thread: the byte that C writes for each comes while the main thread waits in C++, too."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def listen() -> None:
            numbers: set[int] = set()
            while numbers.isdisjoint(CAUGHT):
                numbers = set(os.read(read, 64))
            time.sleep(DEAF)
            if not self._begun():
                _leave(next(number for number in CAUGHT if number in numbers))

        threading.Thread(target=listen, name="signals", daemon=True).start()


def unwrapped(error: BaseException) -> BaseException:
    """The signal's exception where `error` stands for one: DCP's CheckpointException lists what it has caught, by rank;
    else `error`."""
    failures = getattr(error, "failures", None)
    for failure in failures.values() if isinstance(failures, dict) else ():
        cause = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(cause, KeyboardInterrupt | SystemExit):
            return cause
    return error


@contextmanager
def passing() -> Iterator[None]:
    """Let a signal's exception out of a block whose library wraps what it catches."""
    try:
        yield
    except BaseException as error:
        inner = unwrapped(error)
        if inner is error:
            raise
        raise inner from None


def _leave(number: int) -> None:
    if os.environ.get("RANK", "0") == "0" and "ROLE_NAME" not in os.environ:
        os.write(2, f"{sentence(number)}\n".encode())
    os._exit(128 + number)


@contextmanager
def _handled(handler: Any, after: Any = None) -> Iterator[None]:
    """Signals go to `handler`, and from the end of the block on to `after`, or to who had them before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # elsewhere Python catches no signals
        return
    before = {number: signal.signal(number, handler) for number in CAUGHT}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, after or kept)
