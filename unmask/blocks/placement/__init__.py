"""Placements: which rank of the block axis owns which rows of a pack. Pure functions, one file each.

    serial    everything on one rank
    context   conventional context parallelism: all rows in zigzag order, keys and values of all rows shared
    block     block parallelism (BP): noisy blocks placed, each rank recomputes the clean rows they read; nothing shared
    csbp      context-sharded block parallelism: noisy blocks and clean rows placed independently, each balanced by its
              true cost; only clean keys and values are shared

A placement never changes a number of the training: only where it is computed. A block's rows are never divided but by
`context`.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from unmask.registry import Registry
from unmask.rows.rows import Rows

#: Whose keys and values other ranks may read: of the clean rows, of all rows, or of none.
Shared = Literal["clean", "all", "none"]


class Placement(Protocol):
    """A module or object with these two names."""

    SHARED: Shared

    def assign(self, rows: Rows, cost: np.ndarray, ranks: int, speeds: np.ndarray | None = None) -> np.ndarray:
        """Owner of every row, int64 [N] in 0..ranks-1.

        cost: float64 [N], the work of each row in any unit (`unmask.rows.cost.row_costs`); speeds: float64 [ranks], how
        fast the ranks are relative to each other (default: equally). A rank may get no row. Under a placement that
        shares nothing, the owner of a clean row is the rank that takes its loss; whoever needs it recomputes it.
        """
        ...


placements = Registry(
    "placement",
    {
        "serial": "unmask.blocks.placement.serial:placement",
        "context": "unmask.blocks.placement.context:placement",
        "block": "unmask.blocks.placement.block:placement",
        "csbp": "unmask.blocks.placement.csbp:placement",
    },
)


def held(rows: Rows, owner: np.ndarray, shared: Shared, rank: int) -> tuple[np.ndarray, Rows]:
    """Which rows `rank` computes (ascending indices of the pack), and those rows.

    Where something is shared the rows keep the pack's intervals. Where nothing is, they are a pack of their own: the
    rank's blocks and the clean rows these read, directly or not; labels of other ranks' rows are taken off.
    """
    if shared != "none":
        index = np.flatnonzero(owner == rank)
        return index, rows.take(index)
    from dataclasses import replace

    from unmask.rows.rows import IGNORE

    others = replace(rows, label=np.where(owner == rank, rows.label, IGNORE))
    index = others.kept()
    return index, others.pruned()
