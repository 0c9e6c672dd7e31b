"""Packs: documents cut into chunks, chunks laid together so that every pack is as full as can be.

Best-fit decreasing (Johnson 1973; for training, Ding et al. 2404.10830): chunks in falling order of length, each into
the fullest pack that still has room. O(n log n), a function of the lengths alone; no token to learn is lost or doubled.
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

    Documents longer than a pack are cut into chunks of its size, each a Document of its own, which begins as its
    document does where that is with the dataset's `bos`; or they are left out and counted (long_documents="drop"), or
    refused. Chunks without a supervised token, which teach nothing, are left out and counted. len(): packs in a pass;
    `chunks`: Documents in a pass; `tokens`: of these; `longest`: of these, in tokens; `dropped`: documents that are not
    kept; `silent`: chunks that are not kept; `severed`: chunks that are learnt from without the beginning of their
    prompt; `fill`: tokens over room for tokens.
    """

    def __init__(
        self, dataset: Dataset, pack_tokens: int, long_documents: LongDocuments = "cut", name: str = "the data"
    ):
        if pack_tokens < 1:
            raise ValueError(f"pack_tokens={pack_tokens}: a pack holds at least one token")
        self.dataset, self.name = dataset, name
        self.pack_tokens = pack_tokens
        long = np.flatnonzero(dataset.lengths > pack_tokens)
        self.dropped = len(long) if long_documents == "drop" else 0
        if long_documents == "refuse" and len(long):
            more = f", and {len(long) - 1:,} more are longer than a pack" if len(long) > 1 else ""
            raise UserError(
                f"{name}: document {long[0]} has {dataset.lengths[long[0]]:,} tokens{more}: a pack holds "
                f"{pack_tokens:,}; raise data.pack_tokens, or set data.long_documents to cut or drop"
            )
        self._lead = np.array(dataset.bos, np.int64)
        lead = np.zeros(len(dataset), np.int64)
        if len(self._lead) < pack_tokens:
            lead[long] = np.where(dataset.begins(long), len(self._lead), 0)
        parts = 1 + np.maximum(-(-(dataset.lengths - pack_tokens) // (pack_tokens - lead)), 0)
        document = np.repeat(np.arange(len(dataset)), parts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        start = number * (pack_tokens - lead[document]) + np.where(number, lead[document], 0)
        learnt, prompted = dataset.learnt(document, start), dataset.prompted()
        kept = learnt & (dataset.lengths[document] <= pack_tokens) if self.dropped else learnt
        self.silent = int((~learnt).sum()) if not self.dropped else int((~learnt & (parts[document] == 1)).sum())
        self.severed = int((kept & (start > 0) & prompted[document]).sum())
        self._document, self._start = document[kept], start[kept]
        self._before = np.where(self._start, lead[self._document], 0)
        length = np.minimum(dataset.lengths[self._document] - self._start + self._before, pack_tokens)
        pack = best_fit(length, pack_tokens)
        self.tokens = int(length.sum())
        self.longest = int(length.max(initial=0))
        self._order = np.argsort(pack, kind="stable")
        self._bounds = np.r_[0, np.cumsum(np.bincount(pack))] if len(pack) else np.zeros(1, np.int64)

    def notes(self, size: str, long: str = "") -> list[str]:
        """What was left out, and what is learnt without its prompt. size, long: what a user sets these by, if so."""
        size = f"{size}={self.pack_tokens}"
        found = []
        if self.dropped:
            found.append(f"{self.dropped:,} of {len(self.dataset):,} documents are longer than {size} and left out")
        if self.silent:
            found.append(f"parts of documents that hold nothing to learn from, left out: {self.silent:,}")
        if self.severed:
            way = f", or set {long}=drop" if long else ""
            found.append(
                f"parts of documents longer than {size} that are learnt from without the beginning of their prompt: "
                f"{self.severed:,}; make packs larger{way}"
            )
        return found

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
        start, before = int(self._start[chunk]), int(self._before[chunk])
        stop = start + self.pack_tokens - before
        token, supervised = self.dataset.document(int(self._document[chunk]), start, stop)
        if before:
            token, supervised = np.r_[self._lead, token], np.r_[np.zeros(before, bool), supervised]
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
