"""The backend of patterns that are divided over ranks: `attend` calls it as it calls tiles or the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.attention.plan import Pattern
from unmask.blocks.exchange import Axis, Division, build


class DividedPattern(Pattern):
    """Attention of one kind over the rows that this rank holds of a divided pack."""

    def __init__(self, division: Division, exchange: str, axis: Axis, device: torch.device):
        rank = axis.wire.rank
        super().__init__(division.rows, division.window, division.query[rank], "divided", device)
        inert = len(division.held[rank]) == 0  # one row that sees nothing
        self.keys = len(division.held[rank]) + inert
        self.queries = len(division.query[rank]) + (inert and not division.labelled)
        self.division, self.name = division, exchange
        self.exchange = build(exchange, division, axis, device)


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: DividedPattern, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of the rank's queries; see attend."""
    return pattern.exchange.forward(q, k, v, scale)


def backward(
    grad: Tensor, saved: tuple[Tensor, ...], pattern: DividedPattern, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the rank's rows; see attend."""
    return pattern.exchange.backward(grad, saved, scale)
