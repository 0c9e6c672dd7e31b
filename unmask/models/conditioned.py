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
class Part:
    """Rows that run together: token, position int64 [1, n], and their plan."""

    token: Tensor
    position: Tensor
    plan: Plan


@dataclass(frozen=True)
class Apart:
    """The passes over one pack whose clean rows run alone.

    rows: how many clean rows the pack has; clean: these, or one inert row for none; first: the canvases' rows of the
    first pass, told: int64, which of them these are; second: all of the canvases' rows.
    """

    rows: int
    clean: Part
    first: Part
    second: Part
    told: Tensor

    @classmethod
    def of(cls, rows: Rows, planned: Callable[..., Plan], device: torch.device) -> Apart:
        """rows: a pack with at least one canvas; planned(rows, query=...): a plan for the model's layers."""
        count = rows.clean
        told = rows.signal[count:] > 0
        if not told.any():  # the passes of all ranks must agree, so something runs
            told = rows.block[count:] == rows.block[count]
        few = rows.take(np.r_[np.arange(count), np.flatnonzero(told) + count])

        def part(these: Rows, begin: int) -> Part:
            token, position = (torch.from_numpy(each[begin:]).to(device) for each in (these.token, these.position))
            return Part(token[None], position[None], planned(these, query=np.arange(begin, len(these))))

        clean = part(rows.take(np.arange(count)) if count else inert(rows.count), 0)
        index = torch.from_numpy(np.flatnonzero(told)).to(device)
        return cls(count, clean, part(few, count), part(rows, count), index)


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
