"""What is measured beside the loss while a step computes: the loss by noise level, and the gradient noise scale.

An observer sees the terms of every micro-batch and adds up numbers of its own; their sums over all processes become
columns of the log.

The noise level of a row is a column of the rows (`NOISE_LEVEL`, see `with_levels`). Bins of it have equal widths over
(0, 1]: under levels drawn uniformly they are quantiles. Logged is the mean unweighted nll of a bin's labelled rows
since the last line of the log.

The gradient noise scale says at which batch size averaging over more packs stops paying (McCandlish et al. 1812.06162).
A step's gradient G over B packs is the mean of `parts` gradients over b = B / parts packs each (micro-batches, or
replicas). With |G_b|^2 the mean square norm of these and |G_B|^2 that of the whole,

    |G|^2  ~ (B |G_B|^2 - b |G_b|^2) / (B - b)          the true gradient's square norm
    S      ~ (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)      the trace of one pack's gradient covariance
    B_simple = mean(S) / mean(|G|^2)                    in packs: compare it with training.batch_size

Both estimates are unbiased for parts of equal weight; the means are running ones, of numerator and denominator each
(their appendix A.1). The norm of a part costs no memory: it is the accumulated gradient's after the first backward pass
of a step, or a replica's own before the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unmask.objectives.levels import bin_of
from unmask.rows import Document, Rows

if TYPE_CHECKING:
    from unmask.models import RowBatch
    from unmask.objectives import LossTerms

#: The column of rows that holds the bin of the noise level of a row's block, int64; as many as bins for clean rows.
NOISE_LEVEL = "noise_level"
#: Of the running means of the noise scale.
DECAY = 0.98


class Observer(Protocol):
    """Watches the steps of an engine."""

    def begin(self, micro: Sequence[Rows]) -> None:
        """A step begins with these micro-batches, of this process's replica."""

    def see(self, number: int, batch: RowBatch, terms: LossTerms) -> None:
        """Micro-batch `number` has been computed, and its gradient added."""

    def sums(self) -> list[float]:
        """This process's numbers of the step, as many on every process, to be added up."""

    def take(self, sums: Sequence[float]) -> None:
        """The sums over all processes."""


def masked_share(rows: Rows, documents: Sequence[Document], mask_token: int) -> np.ndarray:
    """float64 [N]: the noise level of every row's block, the masked share of its supervised tokens; nan for clean rows.

    documents: those that became `rows`. A whole-document objective has one noisy block a document.
    """
    level = np.full(len(rows), np.nan)
    noisy = np.flatnonzero(rows.block >= 0)
    if not len(noisy):
        return level
    starts = np.cumsum([0, *(len(document) for document in documents)])
    supervised = np.concatenate([document.supervised for document in documents])
    block = rows.block[noisy]
    targets = np.bincount(block, supervised[starts[rows.document[noisy]] + rows.position[noisy]])
    masked = np.bincount(block, rows.token[noisy] == mask_token)
    level[noisy] = (masked / np.maximum(targets, 1))[block]
    return level


def with_levels(rows: Rows, documents: Sequence[Document], mask_token: int, bins: int) -> Rows:
    """The rows with the bin of each one's noise level as a column. documents: those that became `rows`."""
    place = bin_of(masked_share(rows, documents, mask_token), bins)
    return replace(rows, columns={**rows.columns, NOISE_LEVEL: place})


class LevelLosses:
    """The loss by noise level: sums of nll and labelled rows in `bins` bins; 0 bins: nothing is kept."""

    def __init__(self, bins: int):
        self.bins = bins
        self.nll, self.labelled = np.zeros(bins), np.zeros(bins)
        self._sums: Tensor | None = None

    def begin(self, micro: Sequence[Rows]) -> None:
        self._sums = None

    def see(self, number: int, batch: RowBatch, terms: LossTerms) -> None:
        place = batch.columns.get(NOISE_LEVEL)
        if place is None or terms.nll is None or not len(place):
            return
        member = torch.nn.functional.one_hot(place, self.bins + 1)[:, : self.bins].double()
        sums = torch.cat([terms.nll.double() @ member, member.sum(0)])
        self._sums = sums if self._sums is None else self._sums + sums

    def sums(self) -> list[float]:
        """[2 * bins]: nll and labelled rows by bin."""
        return [0.0] * (2 * self.bins) if self._sums is None else self._sums.tolist()

    def take(self, sums: Sequence[float]) -> None:
        self.nll += sums[: self.bins]
        self.labelled += sums[self.bins :]

    def read(self) -> dict[str, float]:
        """{"nll/0.00-0.20": mean nll, ...} of the bins that hold rows, since the last reading."""
        edges = np.linspace(0, 1, self.bins + 1)
        means = {
            f"nll/{edges[bin]:.2f}-{edges[bin + 1]:.2f}": float(self.nll[bin] / self.labelled[bin])
            for bin in np.flatnonzero(self.labelled)
        }
        self.nll[:], self.labelled[:] = 0, 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"nll": self.nll.tolist(), "labelled": self.labelled.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["nll"]) == self.bins:  # else log.levels changed: the next line begins anew
            self.nll, self.labelled = np.array(state["nll"]), np.array(state["labelled"])


class NoiseScale:
    """Running means of S and |G|^2; `value` is their ratio.

    accumulated: the square norm of this process's gradient so far; replica: of what it has put into the sum of
    gradients, where it has one micro-batch; scale: of the loss (fp16).
    """

    def __init__(
        self,
        accumulated: Callable[[], Tensor] = lambda: torch.zeros(()),
        replica: Callable[[], Tensor | float] = lambda: 0.0,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.accumulated, self.replica, self.scale = accumulated, replica, scale
        self.variance = self.square = 0.0
        self._labelled: list[int] = []
        self._first: Tensor | None = None
        self._part = self._parts = 0.0

    def begin(self, micro: Sequence[Rows]) -> None:
        self._labelled = [number for number, rows in enumerate(micro) if len(rows.labelled)]
        self._first = None

    def see(self, number: int, batch: RowBatch, terms: LossTerms) -> None:
        if len(self._labelled) > 1 and number == self._labelled[0]:
            self._first = self.accumulated()

    def sums(self) -> list[float]:
        """(square norm after the first of several micro-batches, processes that have one, square norm of a replica's
        only micro-batch, micro-batches that hold labels)."""
        first = self._first
        return [
            *(0.0 if first is None else float(first), float(first is not None)),
            *(float(self.replica()), float(len(self._labelled))),
        ]

    def take(self, sums: Sequence[float]) -> None:
        first, samples, replica, parts = sums
        mean = first / samples if samples else replica / max(parts, 1.0)
        # A part's gradient is divided by the count of the whole step.
        self._part, self._parts = parts**2 * mean / self.scale() ** 2, parts

    def update(self, norm: float, batch_size: int) -> None:
        """Finish the step: norm of its whole gradient, batch_size: its packs. A step of one part tells nothing."""
        if self._parts > 1:
            self.add(self._part, norm**2, self._parts, batch_size)

    def add(self, part: float, whole: float, parts: float, batch_size: int) -> None:
        """part: mean square norm of the gradients of one part each, every one scaled to estimate the whole gradient;
        whole: square norm of that."""
        square = (parts * whole - part) / (parts - 1)
        variance = (part - whole) * batch_size / (parts - 1)
        self.square = DECAY * self.square + (1 - DECAY) * square
        self.variance = DECAY * self.variance + (1 - DECAY) * variance

    @property
    def value(self) -> float | None:
        """In packs; None before there is an estimate, and while noise makes one of the means negative."""
        return self.variance / self.square if self.square > 0 and self.variance > 0 else None

    def state_dict(self) -> dict[str, float]:
        return {"variance": self.variance, "square": self.square}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.variance, self.square = state["variance"], state["square"]
