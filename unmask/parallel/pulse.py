"""Pulse: every process counts up in the shared store, so that the others can tell which one is gone."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import torch.distributed as dist

#: Seconds between two counts.
BEAT = 0.5


class Pulse:
    """Within `with Pulse(store, rank, size) as pulse:` this process is seen to be alive."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._store = dist.PrefixStore("pulse", store)
        self._rank, self._size = rank, size
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._store.add(str(self._rank), 1)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def silent(self, wait: float = 4 * BEAT) -> list[int]:
        """Ranks whose count has not moved for `wait` seconds; [0] when the store, which rank 0 or the launcher keeps,
        is gone."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            before = [self._store.add(str(rank), 0) for rank in others]
            time.sleep(wait)
            after = [self._store.add(str(rank), 0) for rank in others]
        except RuntimeError:
            return [0]
        return [rank for rank, old, new in zip(others, before, after, strict=True) if old == new]

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._store.add(str(self._rank), 1)
            except RuntimeError:  # the store is gone: whoever waits for it says so
                return
