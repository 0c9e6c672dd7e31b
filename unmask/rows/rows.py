"""Rows: the one description of what a transformer sees in a step, and of who attends to whom.

A row is a token at a position. It is *clean* (part of the shared, uncorrupted sequence) or belongs to one
*noisy block* instance. Row r attends

    { clean rows j : lo[r] <= j < hi[r] }   and, if noisy,   { the first reach[r] rows of its own block }.

Clean rows never see noisy rows. Clean rows come first, in clean order; noisy blocks follow by (hi, block), each
contiguous, so that every rectangle of the attention pattern is a pair of slices. AR, MDLM, BD3LM, Fast-dLLM v2,
drafters and RL traces differ only in these integers; packing and sliding windows are intervals too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

CLEAN = -1
IGNORE = -100


@dataclass(frozen=True)
class Rows:
    """N rows, clean ones first. Arrays are int64 [N] unless said otherwise.

    token, position: the embedding's id and the rotary position (restarts in every document).
    block: CLEAN, or the id of the noisy block instance, increasing in row order.
    lo, hi: the clean rows seen with full attention; `interval` narrows them for a sliding window.
    reach: how many rows of its own block a noisy row sees, counted from the block's first; 0 for a clean row.
    label: target id, or IGNORE; weight: float64 [N], the loss weight of a labelled row.
    document: which packed document the row came from.
    signal: 1 for a noisy row whose embedding learns what a first pass predicted (self-conditioning), else 0.
    count: the loss denominator this pack contributes; the loss is sum(weight * nll) / sum(count over packs).
    columns: whatever else a loss takes of a labelled row, by name: [N] or [N, k], of any dtype.
    """

    token: np.ndarray
    position: np.ndarray
    block: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    reach: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    document: np.ndarray
    signal: np.ndarray
    count: float = 0.0
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token)

    @property
    def clean(self) -> int:
        """Number of clean rows; they are rows [0, clean)."""
        return int(np.searchsorted(self.block, 0))

    @property
    def labelled(self) -> np.ndarray:
        """Indices of the rows that carry a label, int64."""
        return np.flatnonzero(self.label != IGNORE)

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and size of every noisy block, in row order: two int64 arrays."""
        clean = self.clean
        noisy = self.block[clean:]
        if len(noisy) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        starts = np.flatnonzero(np.r_[True, noisy[1:] != noisy[:-1]])
        sizes = np.diff(np.r_[starts, len(noisy)])
        return starts + clean, sizes

    def interval(self, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(lo, hi) for one attention kind: full, or a sliding window of `window` tokens.

        A clean row i then sees back to i - (window - 1); every row of a noisy block that starts at s sees clean
        [s - (window - 1), s), as transformers' windowed cache does.
        """
        if window is None:
            return self.lo, self.hi
        index = np.arange(len(self))
        newest = np.where(index < self.clean, index, self.hi)
        return np.minimum(np.maximum(self.lo, newest - (window - 1)), self.hi), self.hi

    def pruned(self) -> Rows:
        """The same loss and gradients from fewer rows.

        Drops noisy blocks without a label and, at the end of each document, the clean rows that nothing labelled
        reads (the last clean block of every block-diffusion document). Only tails go, so that windows stay true.
        """
        index = self.kept()
        if len(index) == len(self):
            return self
        kept = self.take(index)
        before = np.searchsorted(index, np.arange(self.clean + 1))
        return replace(kept, lo=before[kept.lo], hi=before[kept.hi])

    def kept(self) -> np.ndarray:
        """Ascending indices, int64, of the rows that `pruned` keeps."""
        starts, sizes = self.blocks()
        clean = self.clean
        labelled = self.label != IGNORE
        keep = np.ones(len(self), bool)
        if len(starts):
            keep[clean:] = np.repeat(np.add.reduceat(labelled[clean:], starts - clean) > 0, sizes)
        read = labelled[:clean].copy()
        frontier = np.concatenate([np.flatnonzero(read), np.flatnonzero(keep[clean:]) + clean])
        while len(frontier):
            seen = covered(self.lo[frontier], self.hi[frontier], clean)
            frontier = np.flatnonzero(seen & ~read)
            read |= seen
        # A clean row stays when some row at or after it, in its document, is read.
        last = np.full(int(self.document.max(initial=-1)) + 1, -1)
        np.maximum.at(last, self.document[:clean][read], np.flatnonzero(read))
        keep[:clean] = np.arange(clean) <= last[self.document[:clean]]
        return np.flatnonzero(keep)

    def take(self, index: np.ndarray) -> Rows:
        """The rows at `index`, as they are: intervals still count the original clean rows."""
        columns = {name: column[index] for name, column in self.columns.items()}
        return Rows(**{name: getattr(self, name)[index] for name in ARRAYS}, count=self.count, columns=columns)

    def dense_mask(self, window: int | None = None) -> np.ndarray:
        """bool [N, N], True where row r attends row c. For the reference backend and for small pictures."""
        lo, hi = self.interval(window)
        column = np.arange(len(self))
        mask = (column >= lo[:, None]) & (column < hi[:, None])
        starts, sizes = self.blocks()
        for start, size in zip(starts, sizes, strict=True):
            mask[start : start + size, start : start + size] = np.arange(size) < self.reach[start : start + size, None]
        return mask

    def check(self) -> None:
        """Raise ValueError where an invariant of this class does not hold (for objectives under development)."""
        n, clean = len(self), self.clean
        starts, sizes = self.blocks()
        rules = {
            "every array has N entries": all(len(getattr(self, name)) == n for name in ARRAYS),
            "every column is [N] or [N, k]": all(
                column.ndim in (1, 2) and len(column) == n for column in self.columns.values()
            ),
            "clean rows come first": bool((self.block[:clean] == CLEAN).all() and (self.block[clean:] >= 0).all()),
            "block ids increase in row order": bool((np.diff(self.block[starts]) > 0).all()),
            "intervals lie in the clean rows": bool(((self.lo >= 0) & (self.lo <= self.hi) & (self.hi <= clean)).all()),
            "clean rows reach no block": bool((self.reach[:clean] == 0).all()),
            "a block's rows see the same clean rows": bool(
                (self.hi[clean:] == np.repeat(self.hi[starts], sizes)).all()
            ),
            "reach stays in the block": bool(
                ((self.reach[clean:] >= 0) & (self.reach[clean:] <= np.repeat(sizes, sizes))).all()
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"Rows: broken invariant: {rule}")


ARRAYS = tuple(each.name for each in fields(Rows) if each.name not in ("count", "columns"))


@dataclass(frozen=True)
class Stream:
    """The clean rows of one document, or its noisy rows; every integer counts from the document's first row.

    lo and hi count the document's clean rows. For a noisy stream `block` numbers the block instances (a run of
    equal ids is one block) and `reach` defaults to the whole block; for a clean stream both stay None. `signal`: none.
    columns: see Rows. A stream that lacks a column of another has zeros there, and must then have no label.
    """

    token: np.ndarray
    position: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    block: np.ndarray | None = None
    reach: np.ndarray | None = None
    signal: np.ndarray | None = None
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def instances(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and size of every block of a noisy stream."""
        if self.block is None:
            raise ValueError("a noisy Stream needs block ids")
        starts = np.flatnonzero(np.r_[True, self.block[1:] != self.block[:-1]])
        return starts, np.diff(np.r_[starts, len(self.block)])


def assemble(documents: Sequence[tuple[Stream | None, Stream | None]], count: float) -> Rows:
    """Lay (clean, noisy) streams of the packed documents out in row order: clean first, then blocks by (hi, block).

    ValueError where a stream has labels and lacks a column that another has.
    """
    clean_parts, noisy_parts = [], []
    offset = blocks = 0
    for number, (clean, noisy) in enumerate(documents):
        if clean is not None:
            zeros = np.zeros(len(clean.token), np.int64)
            clean_parts.append(_placed(clean, offset, zeros + CLEAN, zeros, number))
        if noisy is not None and len(noisy.token):
            starts, sizes = noisy.instances()
            instance = np.repeat(np.arange(len(starts)), sizes) + blocks
            reach = np.repeat(sizes, sizes) if noisy.reach is None else noisy.reach
            noisy_parts.append(_placed(noisy, offset, instance, reach, number))
            blocks += len(starts)
        offset += 0 if clean is None else len(clean.token)
    rows = _concatenate(clean_parts + noisy_parts, count)
    noisy_order = np.lexsort((rows.block[offset:], rows.hi[offset:])) + offset
    if not np.array_equal(noisy_order, np.arange(offset, len(rows))):
        rows = rows.take(np.r_[np.arange(offset), noisy_order])
        starts, sizes = rows.blocks()
        rows = replace(rows, block=np.r_[rows.block[:offset], np.repeat(np.arange(len(starts)), sizes)])
    return rows


def padded(rows: Rows, multiple: int) -> Rows:
    """Append inert rows (each sees only itself, carries no label) up to a multiple of `multiple` rows."""
    short = -len(rows) % multiple
    if short == 0:
        return rows
    zeros = np.zeros(short, np.int64)
    first = int(rows.block.max(initial=-1)) + 1
    top = zeros + int(rows.hi[rows.clean :].max(initial=0))  # keeps the order by (hi, block)
    inert = Rows(
        token=zeros,
        position=zeros,
        block=np.arange(first, first + short),
        lo=top,
        hi=top,
        reach=zeros + 1,
        label=zeros + IGNORE,
        weight=zeros.astype(np.float64),
        document=zeros + int(rows.document.max(initial=0)),
        signal=zeros,
    )
    return _concatenate([rows, inert], rows.count)


def inert(count: float) -> Rows:
    """One row without a label that nobody reads: for a rank that would compute nothing."""
    zero = np.array([0])
    return Rows(
        token=zero, position=zero, block=zero, lo=zero, hi=zero, reach=zero + 1, label=zero + IGNORE,
        weight=zero * 0.0, document=zero, signal=zero, count=count,
    )  # fmt: skip


def _placed(stream: Stream, offset: int, block: np.ndarray, reach: np.ndarray, document: int) -> Rows:
    return Rows(
        token=stream.token,
        position=stream.position,
        block=block,
        lo=stream.lo + offset,
        hi=stream.hi + offset,
        reach=reach,
        label=stream.label,
        weight=stream.weight,
        document=np.full(len(stream.token), document, np.int64),
        signal=np.zeros(len(stream.token), np.int64) if stream.signal is None else stream.signal,
        columns=stream.columns,
    )


def _concatenate(parts: Sequence[Rows], count: float) -> Rows:
    if not parts:
        empty: dict[str, Any] = dict.fromkeys(ARRAYS, np.empty(0, np.int64))
        return Rows(**empty, count=count)
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    example = {name: column for part in parts for name, column in part.columns.items()}
    columns = {name: np.concatenate([_column(part, name, like) for part in parts]) for name, like in example.items()}
    return Rows(**arrays, count=count, columns=columns)


def _column(part: Rows, name: str, like: np.ndarray) -> np.ndarray:
    """The column of a part; zeros where it lacks it and no loss would read it."""
    if name in part.columns:
        return part.columns[name]
    if len(part.labelled):
        raise ValueError(f"Rows: document {part.document[0]} has labelled rows without the column {name!r}")
    return np.zeros((len(part), *like.shape[1:]), like.dtype)


def covered(lo: np.ndarray, hi: np.ndarray, n: int) -> np.ndarray:
    """bool [n], True where some interval [lo, hi) covers."""
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, lo, 1)
    np.add.at(change, hi, -1)
    return np.cumsum(change[:-1]) > 0
