"""A function over a stream in several processes, results in the order of the stream."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from unmask.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

#: Inputs on their way for each process: one at work, one that waits.
AHEAD = 2


def ordered(function: Callable[[T], R], stream: Iterable[T], workers: int) -> Generator[R]:
    """`function` of each item, in order: in this process for workers=0, else in so many new ones.

    The function is pickled once a process; only a bounded number of items and results is held. A program that calls
    this with workers must be importable: its work stands under `if __name__ == "__main__":`.
    """
    if not workers:
        yield from map(function, stream)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # Not forked: the threads of a tokeniser, or of torch, would not be there in the child.
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start, (function, stop))
    waiting: deque[Future[R]] = deque()
    try:
        for item in stream:
            with _interrupts_held():  # and so they are in the processes that the first of these starts
                waiting.append(pool.submit(_call, item))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a process that tokenises ended before its work was done ({error}): use fewer --workers, "
            'and let a program of your own begin under `if __name__ == "__main__":`'
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C, which every process of a terminal receives, waits; a process that is started never hears of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_function: Callable[[Any], Any]
_stop: Any


def _start(function: Callable[[Any], Any], stop: Any) -> None:
    """In the new process: one thread of work, an end with its parent, nothing more to do once `stop` is set."""
    global _function, _stop
    _function, _stop = function, stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    return None if _stop.is_set() else _function(item)
