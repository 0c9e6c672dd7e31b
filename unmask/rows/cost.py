"""Exact counts of attended pairs and of floating-point operations, from Rows alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unmask.rows.rows import Rows


def pairs(rows: Rows, window: int | None = None) -> np.ndarray:
    """How many rows each row attends, int64 [N]; their sum is the number of non-empty cells of the mask."""
    lo, hi = rows.interval(window)
    return hi - lo + rows.reach


@dataclass(frozen=True)
class Shape:
    """What the FLOP count needs to know of a decoder.

    linear: parameters every row passes through (all matrices of the layers; for MoE, the active ones);
    head: parameters of the output projection, passed by labelled rows only;
    query_width: heads * head_dim; windows: for each layer, its sliding window in tokens or None.
    """

    linear: int
    head: int
    query_width: int
    windows: tuple[int | None, ...]


def flops(rows: Rows, shape: Shape) -> float:
    """FLOPs of one pack, forward and backward: 6 * parameters * rows + 12 * width * pairs a layer; no recomputation."""
    attended = {window: float(pairs(rows, window).sum()) for window in set(shape.windows)}
    attention = sum(12.0 * shape.query_width * attended[window] for window in shape.windows)
    return 6.0 * shape.linear * len(rows) + 6.0 * shape.head * len(rows.labelled) + attention


def row_costs(rows: Rows, shape: Shape) -> np.ndarray:
    """FLOPs of every row, forward and backward, float64 [N]; they sum to `flops`."""
    cost = np.full(len(rows), 6.0 * shape.linear)
    cost[rows.labelled] += 6.0 * shape.head
    for window in set(shape.windows):
        cost += 12.0 * shape.query_width * shape.windows.count(window) * pairs(rows, window)
    return cost
