"""Intervals to tiles: the non-empty rectangles of an attention pattern, in batches a flash kernel can take.

Row r attends keys lo[r] <= j < hi[r]. The pattern is peeled level by level. At a level of grid G, each row's whole
cells [ceil_G(lo), floor_G(hi)) are taken; adjacent rows that take the same cells make one *full* tile, which needs no
mask. What is left over at both ends goes on to the next, finer level. After the last level the remains are shorter
than two cells; adjacent rows whose remains lie in the same cells make a *boundary* tile, masked unless its rows agree.
Wasted cells are the masked-out part of the boundary tiles: a finer last level wastes less and makes more tiles.

Tiles of equal shape and mask that touch different rows form one `Batch`, one kernel call; so do the noisy blocks of
equal size, each attending itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unmask.rows.rows import Rows

#: Grids tried, coarse to fine. A coarse first level keeps query tiles long (a flash kernel is fastest from about
#: 1,000 rows up), a fine last level wastes less on short documents and narrow windows.
LEVELS = ((1024, 256, 128), (1024, 256, 64), (256, 32), (64, 16))

#: Cells one more kernel call costs, and one more row or key read by a tile (measured: benchmarks/attention.py).
BATCH_COST, ROW_COST = 6000, 8

#: Larger tiles are calls of their own: they run at full speed alone, and a batch of them would copy too much.
LARGEST_BATCHED = 128 * 1024


@dataclass(frozen=True)
class Batch:
    """n rectangles of one shape: rows [q[i], q[i] + rows) attend keys [k[i], k[i] + keys).

    q, k: int64 [n], ascending in q; no two rectangles share a row. mask: bool [rows, keys], or None where every cell
    is attended.
    """

    q: np.ndarray
    rows: int
    k: np.ndarray
    keys: int
    mask: np.ndarray | None

    @property
    def cells(self) -> int:
        """Cells computed, attended or not."""
        return len(self.q) * self.rows * self.keys


def tiles(lo: np.ndarray, hi: np.ndarray, levels: Sequence[tuple[int, ...]] = LEVELS) -> list[Batch]:
    """Rectangles that hold every attended (row, key) pair exactly once: the cheapest of the peelings by `levels`.

    lo, hi: int64 [rows]. Batches come coarse to fine, so the first to reach a row is the largest.
    """
    longest = int((hi - lo).max(initial=0))
    tried = [grids for grids in levels if grids[-1] >= 64 or longest <= 16 * grids[-1]] or list(levels[:1])
    return min((_Peeling(lo, hi, grids) for grids in tried), key=lambda peeling: peeling.cost).batches()


def own_blocks(rows: Rows, query: np.ndarray | None = None, key: np.ndarray | None = None) -> list[Batch]:
    """Every noisy block against itself, up to each row's reach; blocks of one size in one batch.

    query, key: ascending indices of the rows that have queries, and of those that have keys (default: all); q and k
    then count in these selections.
    """
    start, size = rows.blocks()
    query = np.arange(len(rows)) if query is None else query
    key = np.arange(len(rows)) if key is None else key
    first, last = np.searchsorted(query, start), np.searchsorted(query, start + size)
    begin = np.searchsorted(key, start)
    block = np.repeat(np.arange(len(start)), last - first)
    noisy = query[len(query) - len(block) :]
    # How many of a row's reached rows have keys here.
    reach = np.searchsorted(key, start[block] + rows.reach[noisy]) - begin[block]
    keys = np.searchsorted(key, start + size) - begin
    offset = len(query) - len(block)
    shapes: dict[tuple[int, int, bytes], list[int]] = {}
    for i in np.flatnonzero((last > first) & (keys > 0)).tolist():
        ends = reach[first[i] - offset : last[i] - offset]
        reached = b"" if ends[0] == keys[i] and (ends == keys[i]).all() else ends.tobytes()
        shapes.setdefault((int(last[i] - first[i]), int(keys[i]), reached), []).append(i)
    batches = []
    for (n, width, reached), members in shapes.items():
        mask = np.arange(width) < np.frombuffer(reached, np.int64)[:, None] if reached else None
        if mask is None or mask.any():
            batches.append(Batch(first[members], n, begin[members], width, mask))
    return batches


def rectangles(
    rows: Rows, window: int | None = None, query: np.ndarray | None = None, key: np.ndarray | None = None
) -> list[Batch]:
    """Rectangles that hold once every attended pair of a row of `query` and a row of `key`.

    query, key: ascending row indices (default: all rows), in which the rectangles count.
    """
    lo, hi = rows.interval(window)
    if query is not None:
        lo, hi = lo[query], hi[query]
    if key is not None:
        clean = key[: np.searchsorted(key, rows.clean)]
        lo, hi = np.searchsorted(clean, lo), np.searchsorted(clean, hi)
    return tiles(lo, hi) + own_blocks(rows, query, key)


class _Peeling:
    """One way to peel: runs of rows as int64 arrays [6, runs] of q0, q1, k0, k1, group, begin."""

    def __init__(self, lo: np.ndarray, hi: np.ndarray, grids: tuple[int, ...]):
        self.lo, self.hi = lo, hi
        # Rows of equal interval (a block's) are one unit [row, stop) from here on.
        row = np.flatnonzero(np.r_[True, (np.diff(lo) != 0) | (np.diff(hi) != 0)][: len(lo)])
        stop = np.r_[row[1:], len(lo)][: len(row)]
        row, stop, lo, hi = (x[lo[row] < hi[row]] for x in (row, stop, lo[row], hi[row]))
        part = np.zeros(len(row), np.int64)
        runs = []
        for level, grid in enumerate(grids):
            first, last = -(-lo // grid) * grid, hi // grid * grid
            whole = last > first
            runs.append(_runs((row, stop), part + (level << 32), first, last, whole))
            # The right rests (and rows without a whole cell) stay one list; the left rests start another: runs
            # are looked for among neighbours of one list, and two lists may touch the same rows.
            start, left = np.where(whole, last, lo), whole & (lo < first)
            stay = start < hi
            row, stop = np.r_[row[stay], row[left]], np.r_[stop[stay], stop[left]]
            lo, hi = np.r_[start[stay], lo[left]], np.r_[hi[stay], first[left]]
            part = np.r_[part[stay], part[left] + part.max(initial=0) + 1]
        grid = grids[-1]
        every = np.ones(len(row), bool)
        boundary = _runs((row, stop), part + (len(grids) << 32), lo // grid, (hi - 1) // grid, every)
        if len(row):
            boundary[2] = np.minimum.reduceat(lo, boundary[5])
            boundary[3] = np.maximum.reduceat(hi, boundary[5])
        self.full, self.boundary = np.concatenate(runs, axis=1), boundary
        every = np.concatenate([self.full, boundary], axis=1)
        shape = np.stack([every[4], every[1] - every[0], every[3] - every[2]])
        calls = len(np.unique(shape, axis=1).T) if shape.shape[1] else 0
        self.cost = int((shape[1] * shape[2] + ROW_COST * (shape[1] + shape[2])).sum()) + BATCH_COST * calls

    def batches(self) -> list[Batch]:
        masks: list[np.ndarray | None] = [None]
        index: dict[bytes, int] = {}
        mask = [0] * self.full.shape[1] + [self._mask(run, masks, index) for run in self.boundary.T]
        members: dict[tuple[int, ...], list[int]] = {}
        every = np.concatenate([self.full, self.boundary], axis=1)
        for i, (q0, q1, k0, k1, group, _) in enumerate(every.T.tolist()):
            cells = (q1 - q0) * (k1 - k0)
            key = (group, q1 - q0, k1 - k0, mask[i], i if cells > LARGEST_BATCHED else -1)
            members.setdefault(key, []).append(i)
        return [
            Batch(every[0, of], rows, every[2, of], keys, masks[number])
            for (_, rows, keys, number, _), of in members.items()
        ]

    def _mask(self, run: np.ndarray, masks: list[np.ndarray | None], index: dict[bytes, int]) -> int:
        """Number of the boundary tile's mask in `masks`; 0 when all its cells are attended."""
        q0, q1, k0, k1 = run[:4]
        first = np.maximum(self.lo[q0:q1] - k0, 0)
        last = np.minimum(self.hi[q0:q1], k1) - k0
        if not first.any() and (last == k1 - k0).all():
            return 0
        key = np.r_[k1 - k0, first, last].tobytes()
        if key not in index:
            column = np.arange(k1 - k0)
            index[key] = len(masks)
            masks.append((column >= first[:, None]) & (column < last[:, None]))
        return index[key]


def _runs(
    rows: tuple[np.ndarray, np.ndarray], group: np.ndarray, first: np.ndarray, last: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
    """Runs of neighbouring units [row, stop) with equal group, first and last among the chosen: as in _Peeling."""
    row, stop, group, first, last = (x[chosen] for x in (*rows, group, first, last))
    if len(row) == 0:
        return np.zeros((6, 0), np.int64)
    same = (row[1:] == stop[:-1]) & (np.diff(group) == 0) & (np.diff(first) == 0) & (np.diff(last) == 0)
    begin = np.flatnonzero(np.r_[True, ~same])
    end = np.r_[begin[1:], len(row)] - 1
    return np.stack([row[begin], stop[end], first[begin], last[begin], group[begin], begin])
