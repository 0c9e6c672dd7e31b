"""CSBP: context-sharded block parallelism. Clean rows and noisy blocks are placed independently.

The loss of block diffusion is a sum over noisy blocks, each of which attends to clean rows and itself: a block is
computed on one rank, and only clean keys and values are sent. Clean rows are assigned first; blocks then go where the
work is balanced, and among balanced assignments to the rank of the clean rows they attend to most, so that a window or
a short document needs few rows of other ranks.
"""

from __future__ import annotations

import numpy as np

from unmask.blocks.placement import Shared
from unmask.blocks.placement.balance import balance, evened, first_balanced, zigzag
from unmask.rows.rows import Rows

#: Bounds between ranks fall on multiples of this many clean rows where a segment is at least 16 times as long.
GRID = 64


class ContextShardedBlocks:
    SHARED: Shared = "clean"

    def assign(self, rows: Rows, cost: np.ndarray, ranks: int, speeds: np.ndarray | None = None) -> np.ndarray:
        clean = rows.clean
        speed = np.ones(ranks) if speeds is None else np.asarray(speeds, float)
        owner = _clean(rows, cost[:clean], speed)
        load = np.bincount(owner, weights=cost[:clean], minlength=ranks)
        starts, sizes = rows.blocks()
        if len(starts) == 0:
            return owner
        blocks = np.add.reduceat(cost, starts)
        in_order = zigzag(len(starts), ranks, speeds)
        candidates = [in_order, evened(in_order, blocks, speed, load), balance(blocks, ranks, speeds, load)]
        if clean:
            # The last clean row a block reads; a block that reads none lies beside the document's first.
            beside = np.clip(rows.hi[starts] - 1, 0, clean - 1)
            candidates.insert(
                0, owner[np.where(rows.hi[starts] > rows.lo[starts], beside, rows.lo[starts].clip(0, clean - 1))]
            )
        return np.r_[owner, np.repeat(first_balanced(candidates, blocks, speed, load), sizes)]


def _clean(rows: Rows, cost: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Owner of every clean row: the whole pack zigzag, or documents of less than a rank's share kept whole."""
    clean, ranks = rows.clean, len(speed)
    grid = GRID if clean >= 16 * GRID * 2 * ranks else 1
    whole = zigzag(clean, ranks, speed, grid)
    document = rows.document[:clean]
    if clean == 0 or document[0] == document[-1]:
        return whole
    by_document = np.bincount(document, weights=cost)
    long = by_document > cost.sum() / (2 * ranks)
    kept = np.zeros(clean, np.int64)
    load = np.zeros(ranks)
    for number in np.flatnonzero(long).tolist():
        at = np.flatnonzero(document == number)
        kept[at] = zigzag(len(at), ranks, speed)
        load += np.bincount(kept[at], weights=cost[at], minlength=ranks)
    short = np.flatnonzero(~long)
    place = np.zeros(len(by_document), np.int64)
    place[short] = balance(by_document[short], ranks, speed, load)
    kept = np.where(long[document], kept, place[document])
    return first_balanced([kept, whole], cost, speed, np.zeros(ranks))


placement = ContextShardedBlocks()
