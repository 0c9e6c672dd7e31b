"""Self-conditioning over rows: a first pass without gradient tells the second one what it predicts.

    together    first [clean; canvases],              second [clean; canvases]
    apart       clean;   first canvases | clean,      second canvases | clean

`canvases | clean` runs the canvases' rows alone, their queries over the keys and values that the clean rows left in
every layer. No clean row sees a canvas, so both give the same numbers. Apart, the clean rows are computed once, with
gradient, and the first pass runs the canvases that are told of it and no others: of C clean and M noisy rows, a share p
of them told, forward and backward (two forwards' worth) take 3 C + (3 + p) M rows' work in place of 4 C + 4 M. But
layers run three times instead of twice: it is not done where each time sends something (`unmask.parallel.apply`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmask.attention import Plan
from unmask.rows import Rows, inert


@dataclass(frozen=True)
class Apart:
    """The passes over one pack whose clean rows run alone.

    token, position int64 [1, max(C, 1)]: of the clean rows, or of one inert row for a pack without; clean: their plan;
    first: int64 [s], which of the canvases' rows run in the first pass, and first_plan, second_plan: these rows', and
    all canvases' rows', queries over clean keys and their own.
    """

    rows: int
    token: Tensor
    position: Tensor
    clean: Plan
    first: Tensor
    first_plan: Plan
    second_plan: Plan

    @classmethod
    def of(cls, rows: Rows, planned: Callable[..., Plan], device: torch.device) -> Apart:
        """rows: a pack with at least one canvas; planned(rows, query=...): a plan for the model's layers."""
        clean, noisy = np.arange(rows.clean), np.arange(rows.clean, len(rows))
        alone = rows.take(clean) if len(clean) else inert(rows.count)
        told = rows.signal[rows.clean :] > 0
        if not told.any():  # the ranks' passes must agree, so something runs
            told = rows.block[rows.clean :] == rows.block[rows.clean]
        few = rows if told.all() else rows.take(np.r_[clean, noisy[told]])
        token, position, first = (
            torch.from_numpy(array).to(device) for array in (alone.token, alone.position, np.flatnonzero(told))
        )
        return cls(
            rows=len(clean),
            token=token[None],
            position=position[None],
            clean=planned(alone),
            first=first,
            first_plan=planned(few, query=np.arange(rows.clean, len(few))),
            second_plan=planned(rows, query=noisy),
        )


class Kept:
    """What the clean rows' pass leaves: keys and values of its first `rows` rows, of every layer.

    A layer that checkpointing repeats finds its own kept already, with the gradient's path through them.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            self.layers[layer] = key[:, :, : self.rows], value[:, :, : self.rows]
        return key, value


class Before:
    """What the canvases' passes attend: the clean rows' keys and values, then their own."""

    def __init__(self, kept: Kept):
        self.layers = kept.layers

    def attended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        before = self.layers[layer]
        return _joined(before[0], key), _joined(before[1], value)


def _joined(before: Tensor, own: Tensor) -> Tensor:
    """[1, heads, rows, head_dim] one after the other, rows first in memory as both are."""
    return torch.cat([before.transpose(1, 2), own.transpose(1, 2)], 1).transpose(1, 2)
