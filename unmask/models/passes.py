"""A step's passes through the decoder, as a list: whose rows run, with gradient or not, and what one leaves the next.

    once        rows                  all

    together    first                 all, no gradient        leaves predictions
                second                all, conditioned on these

    apart       clean                 clean rows              leave keys and values
                first                 canvases | clean, no gradient: those that are conditioned; leave predictions
                second                canvases | clean, conditioned on these

Self-conditioning takes two passes: the first, without gradient, tells the second what it predicts. `canvases | clean`
runs the canvases' rows alone, their queries over the keys and values that the clean rows left in every layer. No clean
row sees a canvas, so `apart` gives the numbers of `together`, and computes the clean rows once: of C clean and M noisy
rows, a share p of them conditioned, forward and backward (two forwards' worth) take 3 C + (3 + p) M rows' work in place
of 4 C + 4 M. But layers run three times instead of twice: it is not done where each time sends something
(`unmask.parallel.apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.attention import Plan
from unmask.rows import Rows, inert


@dataclass(frozen=True)
class Predictions:
    """rows: int64 [s], those of a pass whose predictions are the signal of the canvases' rows `learners`, int64 [s],
    of `count` such rows of the pack, in the passes after it; the others' signal is 0."""

    rows: Tensor
    learners: Tensor
    count: int


@dataclass(frozen=True)
class Pass:
    """Rows that run through the decoder together: token, position int64 [1, n], and their plan.

    canvas: int64 [m], the noisy rows among them, of a model that knows clean from noisy ones; they take the signal, if
    there is one. gradient: whether the pass has one. keeps: its first rows leave their keys and values, so many; reads:
    it attends to these, then to its own. leaves: predictions in place of hidden states. emits: how many of its first
    rows are the pack's own, None for all: an inert row stands in for none.
    """

    token: Tensor
    position: Tensor
    plan: Plan
    canvas: Tensor | None = None
    gradient: bool = True
    keeps: int | None = None
    reads: bool = False
    leaves: Predictions | None = None
    emits: int | None = None


def together(once: Pass, rows: Rows) -> tuple[Pass, ...]:
    """Two passes of all rows of a pack. `once`: a pass of them.

    All rows run in the first too, on every rank and for every pack: the ranks' collectives must agree.
    """
    assert once.canvas is not None
    learners = torch.from_numpy(np.flatnonzero(rows.signal[rows.clean :])).to(once.canvas.device)
    predictions = Predictions(once.canvas[learners], learners, len(once.canvas))
    return replace(once, gradient=False, leaves=predictions), once


def apart(rows: Rows, planned: Callable[..., Plan], device: torch.device) -> tuple[Pass, ...]:
    """Three passes: of the clean rows of a pack, of the canvases that are conditioned, of all canvases.

    rows: with at least one canvas; planned(rows, query=...): a plan for the model's layers.
    """
    count = rows.clean
    learns = rows.signal[count:] > 0
    runs = learns if learns.any() else rows.block[count:] == rows.block[count]  # passes of all ranks must agree
    few = rows.take(np.r_[np.arange(count), np.flatnonzero(runs) + count])

    def part(these: Rows, begin: int, **options: Any) -> Pass:
        token, position = (torch.from_numpy(each[begin:]).to(device)[None] for each in (these.token, these.position))
        return Pass(token, position, planned(these, query=np.arange(begin, len(these))), **options)

    def canvases(these: Rows, **options: Any) -> Pass:
        index = torch.arange(len(these) - count, device=device)
        return part(these, count, canvas=index, reads=True, **options)

    learners = torch.from_numpy(np.flatnonzero(learns)).to(device)
    predictions = Predictions(torch.arange(len(learners), device=device), learners, len(learns))
    clean = rows.take(np.arange(count)) if count else inert(rows.count)
    return (
        part(clean, 0, keeps=count, emits=count),
        canvases(few, gradient=False, leaves=predictions),
        canvases(rows),
    )


def run(
    passes: Sequence[Pass],
    decoder: Callable[..., Any],
    signal_of: Callable[[Tensor], Tensor],
    embedded: Tensor | None = None,
) -> Tensor:
    """Final hidden states of the passes that emit them, one after the other: [1, N, width], or of the labelled rows
    only where their plan says so.

    signal_of: hidden states [s, width] -> what their predictions tell, [s, width]; embedded: hidden states [1, n,
    width] that the first pass begins with in place of its tokens' embeddings.
    """
    layers: dict[int, tuple[Tensor, Tensor]] = {}
    signal, emitted = None, []
    for each in passes:
        given: dict[str, Any] = {"input_ids": each.token} if embedded is None else {"inputs_embeds": embedded}
        if each.canvas is not None:
            given |= {"canvas": each.canvas, "signal": signal}
        if each.keeps is not None:
            given["cache"] = Keeping(layers, each.keeps)
        elif each.reads:
            given["cache"] = Reading(layers)
        with nullcontext() if each.gradient else torch.no_grad():
            output = decoder(**given, position_ids=each.position, plan=each.plan, use_cache=False)
        hidden, embedded = output.last_hidden_state, None
        if each.leaves is not None:
            signal = _signal(each.leaves, signal_of, hidden[0])
        else:
            emitted.append(hidden if each.emits is None else hidden[:, : each.emits])
    return emitted[0] if len(emitted) == 1 else torch.cat(emitted, 1)


def _signal(predictions: Predictions, signal_of: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """[1, count, width] from the hidden states of a pass, [n, width]."""
    # Autocast keeps the weights that it has cast, here without a gradient: the passes after it would use them.
    torch.clear_autocast_cache()
    told = signal_of(hidden.index_select(0, predictions.rows))
    every = torch.zeros((predictions.count, told.shape[1]), dtype=told.dtype, device=told.device)
    return every.index_copy(0, predictions.learners, told)[None]


@dataclass
class Keeping:
    """Leaves the keys and values of a pass's first `rows` rows in `layers`, by layer.

    A layer that checkpointing repeats finds its own there already, with the gradient's path through them.
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    rows: int

    def attended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            self.layers[layer] = key[:, :, : self.rows], value[:, :, : self.rows]
        return key, value


@dataclass
class Reading:
    """What a pass that reads attends: the keys and values that are kept, then its own."""

    layers: dict[int, tuple[Tensor, Tensor]]

    def attended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        before = self.layers[layer]
        return _joined(before[0], key), _joined(before[1], value)


def _joined(before: Tensor, after: Tensor) -> Tensor:
    """[1, heads, rows, head_dim] one after the other, rows first in memory as both are."""
    return torch.cat([before.transpose(1, 2), after.transpose(1, 2)], 1).transpose(1, 2)
