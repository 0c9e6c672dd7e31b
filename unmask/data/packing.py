"""Packs: documents cut into chunks, chunks laid together so that every pack is as full as can be.

Best-fit decreasing (Johnson 1973; for training, Ding et al. 2404.10830): chunks in falling order of length, each into
the fullest pack that still has room. O(n log n), a function of the lengths alone; no token is lost or doubled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal

import numpy as np

from unmask.data.dataset import Dataset
from unmask.errors import UserError
from unmask.rows import Document

LongDocuments = Literal["cut", "refuse", "drop"]


class Packs:
    """One pass over a dataset as packs of at most `pack_tokens` tokens; `packs[i]` is a list of Documents.

    Documents longer than a pack are cut into chunks of its size, each a Document of its own; or they are left out and
    counted (long_documents="drop"), or refused. len(): packs in a pass; `chunks`: Documents in a pass; `tokens`: of
    the documents that are kept; `longest`: of the Documents, in tokens; `dropped`: documents that are not kept; `fill`:
    tokens over room for tokens.
    """

    def __init__(
        self, dataset: Dataset, pack_tokens: int, long_documents: LongDocuments = "cut", name: str = "the data"
    ):
        if pack_tokens < 1:
            raise ValueError(f"pack_tokens={pack_tokens}: a pack holds at least one token")
        self.dataset = dataset
        self.pack_tokens = pack_tokens
        parts = -(-dataset.lengths // pack_tokens)
        long = np.flatnonzero(parts > 1)
        self.dropped = 0
        if long_documents == "refuse" and len(long):
            more = f", and {len(long) - 1:,} more are longer than a pack" if len(long) > 1 else ""
            raise UserError(
                f"{name}: document {long[0]} has {dataset.lengths[long[0]]:,} tokens{more}: a pack holds "
                f"{pack_tokens:,}; raise data.pack_tokens, or set data.long_documents to cut or drop"
            )
        if long_documents == "drop":
            parts[long] = 0
            self.dropped = len(long)
        self._document = np.repeat(np.arange(len(dataset)), parts)
        first = np.cumsum(parts) - parts
        self._start = (np.arange(len(self._document)) - np.repeat(first, parts)) * pack_tokens
        length = np.minimum(dataset.lengths[self._document] - self._start, pack_tokens)
        pack = best_fit(length, pack_tokens)
        self.tokens = int(length.sum())
        self.longest = int(length.max(initial=0))
        self._order = np.argsort(pack, kind="stable")
        self._bounds = np.r_[0, np.cumsum(np.bincount(pack))] if len(pack) else np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def chunks(self) -> int:
        return len(self._document)

    @property
    def fill(self) -> float:
        return self.tokens / max(len(self) * self.pack_tokens, 1)

    def __getitem__(self, index: int) -> list[Document]:
        return self.documents(index)

    def __iter__(self) -> Iterator[list[Document]]:
        return (self.documents(index) for index in range(len(self)))

    def documents(self, index: int, epoch: int = 0) -> list[Document]:
        """The Documents of a pack; in every epoch they have samples of their own, and so noise of their own."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        chosen = self._order[self._bounds[index] : self._bounds[index + 1]]
        return [self._chunk(int(chunk), epoch) for chunk in chosen]

    def _chunk(self, chunk: int, epoch: int) -> Document:
        start = int(self._start[chunk])
        token, supervised = self.dataset.document(int(self._document[chunk]), start, start + self.pack_tokens)
        return Document(token, supervised, epoch * self.chunks + chunk)


def best_fit(length: np.ndarray, room: int) -> np.ndarray:
    """Which pack each chunk goes into, int64 [n], packs counted from 0. length: int [n], each in [1, room]."""
    pack = np.empty(len(length), np.int64)
    full = np.flatnonzero(length == room)
    pack[full] = np.arange(len(full))
    packs = len(full)
    left: list[int] = []  # the distinct amounts of room left, rising
    open_packs: dict[int, list[int]] = {}  # the packs with that much room
    rest = np.flatnonzero(length < room)
    rest = rest[np.argsort(-length[rest], kind="stable")]
    for chunk, size in zip(rest.tolist(), length[rest].tolist(), strict=True):
        place = bisect_left(left, size)
        if place == len(left):
            number, remaining = packs, room - size
            packs += 1
        else:
            waiting = open_packs[left[place]]
            number, remaining = waiting.pop(), left[place] - size
            if not waiting:
                del open_packs[left.pop(place)]
        pack[chunk] = number
        if remaining in open_packs:
            open_packs[remaining].append(number)
        elif remaining:
            open_packs[remaining] = [number]
            insort(left, remaining)
    return pack
