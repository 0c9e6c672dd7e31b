"""Serial: one rank computes the pack."""

from __future__ import annotations

import numpy as np

from unmask.blocks.placement import Shared
from unmask.rows.rows import Rows


class Serial:
    SHARED: Shared = "none"

    def assign(self, rows: Rows, cost: np.ndarray, ranks: int, speeds: np.ndarray | None = None) -> np.ndarray:
        return np.zeros(len(rows), np.int64)


placement = Serial()
