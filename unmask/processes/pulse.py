"""Pulse: every process counts up in the shared store, so that the others can tell which one is gone."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import torch.distributed as dist

#: Seconds between two counts.
BEAT = 0.5

#: Seconds that rank 0 stays for the others' sake when one is lost.
ASKING = 5.0


class Pulse:
    """Within `with Pulse(store, rank, size) as pulse:` this process is seen to be alive."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._store = dist.PrefixStore("pulse", store)
        self._rank, self._size = rank, size
        self._found = ""
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

    def verdict(self, gone: list[int] | None = None) -> tuple[list[int], bool]:
        """(ranks that are gone, whether another process tells the user). gone: what is known already.

        A process that stops looks gone to those that ask later: so what the first to ask finds is what all say.
        """
        try:
            if not self._found:
                mine = ",".join(map(str, self.silent() if gone is None else gone))
                self._found = self._store.compare_set("verdict", "", mine or "nobody").decode()
            told = self._store.add("asked", 1) > 1
            self._let_others_ask()
        except RuntimeError:
            # The store went with the process that kept it: rank 0, unless a launcher does. Rank 1 speaks for the rest.
            told = bool(self._found) or self._rank != 1
        found = self._found or "0"
        return ([] if found == "nobody" else [int(rank) for rank in found.split(",")]), told

    def _let_others_ask(self) -> None:
        """The store may live in rank 0, which therefore stays until it has seen the others go."""
        gone = 0 if self._found == "nobody" else self._found.count(",") + 1
        over = time.monotonic() + ASKING
        while self._rank == 0 and time.monotonic() < over and self._store.add("asked", 0) < self._size - gone:
            time.sleep(BEAT / 5)

    def silent(self, wait: float = 4 * BEAT) -> list[int]:
        """Ranks whose count has not moved for `wait` seconds."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        before = [self._store.add(str(rank), 0) for rank in others]
        time.sleep(wait)
        after = [self._store.add(str(rank), 0) for rank in others]
        return [rank for rank, old, new in zip(others, before, after, strict=True) if old == new]

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._store.add(str(self._rank), 1)
                if not self._found and self._store.check(["verdict"]):
                    self._found = self._store.get("verdict").decode()
            except RuntimeError:  # the store is gone: whoever waits for it says so
                return
