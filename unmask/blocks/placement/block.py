"""Block: block parallelism (BP). Noisy blocks are placed; each rank recomputes the clean rows its blocks read.

Nothing crosses the network. The clean work is repeated on every rank, so a block's cost counts its own rows only, and
labelled clean rows (an autoregressive loss) are kept together document by document.
"""

from __future__ import annotations

import numpy as np

from unmask.blocks.placement import Shared
from unmask.blocks.placement.balance import balance, evened, first_balanced, zigzag
from unmask.rows.rows import IGNORE, Rows


class Block:
    SHARED: Shared = "none"

    def assign(self, rows: Rows, cost: np.ndarray, ranks: int, speeds: np.ndarray | None = None) -> np.ndarray:
        clean = rows.clean
        starts, sizes = rows.blocks()
        documents = int(rows.document.max(initial=-1)) + 1
        labelled = np.where(rows.label[:clean] != IGNORE, cost[:clean], 0.0)
        by_document = np.bincount(rows.document[:clean], weights=labelled, minlength=documents)
        by_block = np.add.reduceat(cost, starts) if len(starts) else np.empty(0)
        items = np.r_[by_document, by_block]
        speed = np.ones(ranks) if speeds is None else np.asarray(speeds, float)
        in_order = np.r_[balance(by_document, ranks, speeds), zigzag(len(starts), ranks, speeds)]
        none = np.zeros(ranks)
        candidates = [in_order, evened(in_order, items, speed, none), balance(items, ranks, speeds)]
        owner = first_balanced(candidates, items, speed, none)
        return np.r_[owner[rows.document[:clean]], np.repeat(owner[documents:], sizes)]


placement = Block()
