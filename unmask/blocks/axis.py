"""The block axis of a training step: placement + mesh -> the rows and the plan of this rank.

    owner = placement.assign(rows, cost)          every rank computes the same
    rows, plan = what this rank holds             clean rows first, then its noisy blocks
    loss, gradients                               summed over the ranks, nothing else changes

With `csbp` the plan's attention exchanges clean keys and values; with `context` all rows'; with `block` nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unmask.attention import Plan
from unmask.blocks.exchange import Axis, Division, Widths, bytes_sent, resolve
from unmask.blocks.exchange.divided import DividedPattern
from unmask.blocks.placement import Placement, held, placements
from unmask.config import ParallelConfig
from unmask.rows import IGNORE, Rows, Shape, inert, pairs
from unmask.rows.cost import row_costs

#: `auto` takes, among the placements whose slowest rank is within this factor of the best, the one that sends least.
SLACK = 1.05
CANDIDATES = ("csbp", "context", "block")


@dataclass(frozen=True)
class Placed:
    """One pack on the block axis. name: of the placement; owner: rank of every row, int64 [N]."""

    name: str
    placement: Placement
    rows: Rows
    owner: np.ndarray
    ranks: int

    def local(self, rank: int) -> tuple[np.ndarray, Rows]:
        """What `rank` computes: ascending indices of the pack, and the rows (one inert row where there are none)."""
        return held(self.rows, self.owner, self.placement.SHARED, rank)

    def division(self, window: int | None, labelled: bool = False) -> Division:
        return Division.of(self.rows, self.owner, self.ranks, self.placement.SHARED, window, labelled)


class Layers:
    """What the block axis needs to know of a decoder's attention.

    kinds: (window, labelled queries only) of every layer; widths: of a row on the wire, by window where kinds of
    layers differ; shape: for the costs.
    """

    def __init__(self, shape: Shape, widths: Widths | dict[int | None, Widths]):
        self.shape = shape
        self.widths = widths if isinstance(widths, dict) else dict.fromkeys(shape.windows, widths)
        self.kinds = [(window, False) for window in shape.windows]
        if shape.skips:
            self.kinds[-1] = (shape.windows[-1], True)


def place(
    rows: Rows,
    layers: Layers,
    ranks: int,
    name: str = "auto",
    exchange: str = "auto",
    speeds: np.ndarray | None = None,
    node_size: int | None = None,
) -> Placed:
    """The pack placed on `ranks` ranks by the placement `name`; `auto` by the slowest rank's work, then by bytes."""
    cost = row_costs(rows, layers.shape)
    if name != "auto":
        placement = placements[name]
        return Placed(name, placement, rows, placement.assign(rows, cost, ranks, speeds), ranks)
    tried = []
    for candidate in CANDIDATES:
        placed = place(rows, layers, ranks, candidate, exchange, speeds)
        slowest = (work(placed, layers) / (1.0 if speeds is None else speeds)).max()
        forward, backward = sent(placed, layers, exchange, node_size)
        tried.append((slowest, forward.sum() + backward.sum(), placed))
    best = min(slowest for slowest, _, _ in tried)
    return min((each for each in tried if each[0] <= SLACK * best), key=lambda each: each[1])[2]


def work(placed: Placed, layers: Layers) -> np.ndarray:
    """FLOPs of every rank, forward and backward, float64 [ranks]."""
    if placed.placement.SHARED == "none":
        return np.array([row_costs(placed.local(rank)[1], layers.shape).sum() for rank in range(placed.ranks)])
    cost = row_costs(placed.rows, layers.shape)
    return np.bincount(placed.owner, weights=cost, minlength=placed.ranks)


def sent(placed: Placed, layers: Layers, exchange: str, node_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends for one pack over all layers, forward and backward (without recomputation): exact."""
    forward, backward = np.zeros(placed.ranks, np.int64), np.zeros(placed.ranks, np.int64)
    if placed.placement.SHARED == "none":
        return forward, backward
    for kind in dict.fromkeys(layers.kinds):
        division = placed.division(*kind)
        widths = layers.widths[kind[0]]
        name = resolve(exchange, division, widths)
        there, back = bytes_sent(name, division, widths, node_size)
        forward += layers.kinds.count(kind) * there
        backward += layers.kinds.count(kind) * back
    return forward, backward


class RankPart(NamedTuple):
    """What one rank computes of a pack of N rows, n of them labelled.

    rows: its own; plan: theirs, None for a pack of their own; held: int64, which of the n labelled rows these have;
    whole: their values -> the values of all n; counted: bool, of each of its rows whether no earlier rank has it too.
    """

    rows: Rows
    plan: Plan | None
    held: np.ndarray
    whole: Callable[[Tensor], Tensor]
    counted: np.ndarray


class BlockAxis:
    """Divides packs over the ranks of a block axis. Called by RowModel.collate; the same on every rank but `rank`.

    once: whether somebody wants to know which rows no earlier rank computes too.
    """

    def __init__(
        self, axis: Axis, layers: Layers, config: ParallelConfig, speeds: np.ndarray | None = None, once: bool = False
    ):
        self.axis, self.layers, self.config, self.speeds, self.once = axis, layers, config, speeds, once
        self._rows = self._pairs = 0

    @property
    def rank(self) -> int:
        return self.axis.wire.rank

    def divide(self, rows: Rows, device: torch.device) -> RankPart:
        """This rank's part of a pack."""
        config = self.config
        placed = place(
            *(rows, self.layers, self.axis.wire.size, config.placement, config.exchange, self.speeds, config.node_size)
        )
        index, local = placed.local(self.rank)
        self._rows += len(local)
        self._pairs += int(pairs(local).sum())
        counted = self._counted(placed, index, len(local))
        if len(local) == 0:
            local = inert(rows.count)
        mine = np.searchsorted(rows.labelled, index[local.label[: len(index)] != IGNORE])
        whole = partial(self._whole, mine, len(rows.labelled))
        plan = None if placed.placement.SHARED == "none" else self._plan(placed, local, device)
        return RankPart(local, plan, mine, whole, counted)

    def read(self) -> dict[str, Any]:
        """This rank's rows and their pairs in a full layer, since the last reading."""
        found = {"rank_rows": self._rows, "rank_pairs": self._pairs}
        self._rows = self._pairs = 0
        return found

    def _counted(self, placed: Placed, index: np.ndarray, rows: int) -> np.ndarray:
        """bool [rows]: those of the pack, at `index` in it, that no earlier rank computes too."""
        counted = np.zeros(max(rows, 1), bool)
        counted[: len(index)] = True
        if self.once and placed.placement.SHARED == "none":
            for rank in range(self.rank):
                counted[: len(index)] &= ~np.isin(index, placed.local(rank)[0])
        return counted

    def _plan(self, placed: Placed, local: Rows, device: torch.device) -> Plan:
        patterns: dict[Any, Any] = {}
        for kind in dict.fromkeys(self.layers.kinds):
            division = placed.division(*kind)
            name = resolve(self.config.exchange, division, self.layers.widths[kind[0]])
            patterns[kind] = DividedPattern(division, name, self.axis, device)
        labelled = torch.from_numpy(local.labelled).to(device) if any(only for _, only in self.layers.kinds) else None
        return Plan(patterns, labelled)

    def _whole(self, mine: np.ndarray, count: int, values: Tensor) -> Tensor:
        """The values of all `count` labelled rows, from those of this rank's."""
        total = values.new_zeros(count)
        total[torch.from_numpy(mine).to(values.device)] = values
        dist.all_reduce(total, group=self.axis.wire.groups[0])
        return total
