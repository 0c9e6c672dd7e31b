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
    head: parameters labelled rows alone pass through (the output projection, most of a last layer that skips);
    query_width: heads * head_dim, a mean over layers; windows: for each layer, its sliding window in tokens or None;
    skips: the last layer has queries for labelled rows only.
    """

    linear: int
    head: int
    query_width: int
    windows: tuple[int | None, ...]
    skips: bool = False


def flops(rows: Rows, shape: Shape) -> float:
    """FLOPs of one pack, forward and backward: 6 * parameters * rows + 12 * width * pairs a layer; no recomputation."""
    attended = {window: pairs(rows, window) for window in set(shape.windows)}
    total = sum(float(attended[window].sum()) for window in shape.windows)
    if shape.skips:
        last = attended[shape.windows[-1]]
        total -= float(last.sum() - last[rows.labelled].sum())
    return 6.0 * (shape.linear * len(rows) + shape.head * len(rows.labelled)) + 12.0 * shape.query_width * total


def row_costs(rows: Rows, shape: Shape) -> np.ndarray:
    """FLOPs of every row, forward and backward, float64 [N]; they sum to `flops`."""
    cost = np.full(len(rows), 6.0 * shape.linear)
    cost[rows.labelled] += 6.0 * shape.head
    for layer, window in enumerate(shape.windows):
        attended = 12.0 * shape.query_width * pairs(rows, window)
        if shape.skips and layer == len(shape.windows) - 1:
            cost[rows.labelled] += attended[rows.labelled]
        else:
            cost += attended
    return cost
