"""Context: conventional context parallelism. All rows are assigned in zigzag, and all keys and values are shared.

Clean and noisy rows are assigned separately (one zigzag over both would give some ranks no noisy row).
"""

from __future__ import annotations

import numpy as np

from unmask.blocks.placement import Shared
from unmask.blocks.placement.balance import zigzag
from unmask.rows.rows import Rows


class Context:
    SHARED: Shared = "all"

    def assign(self, rows: Rows, cost: np.ndarray, ranks: int, speeds: np.ndarray | None = None) -> np.ndarray:
        return np.r_[zigzag(rows.clean, ranks, speeds), zigzag(len(rows) - rows.clean, ranks, speeds)]


placement = Context()
