"""A function over a stream in several processes, results in the order of the stream."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
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
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (function,))
    waiting: deque[Future[R]] = deque()
    try:
        for item in stream:
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
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]


def _start(function: Callable[[Any], Any]) -> None:
    """In the new process: one thread of work, no answer to Ctrl-C, an end with its parent."""
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
