"""The data of the next step, made ready in a thread while the present step computes.

What a step trains on is a pure function of what it is asked for with, so data made ahead are the same data; where the
trainer then asks for something else (an evaluation has changed the objective), they are thrown away and made anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Loader(Generic[K, T]):
    """`make(key)`, and `ahead(key)` to have it begun. waited: seconds that `get` has taken in all."""

    def __init__(self, make: Callable[[K], T]):
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[K, Future[T]] | None = None
        self.waited = 0.0

    def get(self, key: K) -> T:
        """The value of `key`, made now unless it was made ahead. Raises what `make` raises."""
        start = time.perf_counter()
        kept, self._next = self._next, None
        try:
            if kept is not None and kept[0] == key:
                return kept[1].result()
            if kept is not None:
                kept[1].cancel()
            return self._make(key)
        finally:
            self.waited += time.perf_counter() - start

    def ahead(self, key: K) -> None:
        """Begin with the value that will be asked for next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "unmask-loader")
        self._next = key, self._thread.submit(self._make, key)

    def close(self) -> None:
        """Let go of the thread; what it is making is not waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
