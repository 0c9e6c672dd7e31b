"""The gradient noise scale: at which batch size averaging over more packs stops paying (McCandlish et al. 1812.06162).

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

from collections.abc import Sequence

import torch
from torch import Tensor

#: Of the running means.
DECAY = 0.98


def square(gradients: list[Tensor]) -> Tensor:
    """The square norm of a gradient, fp64 and still on its device."""
    return torch.nn.utils.get_total_norm(gradients).double().square()


class NoiseScale:
    """Running means of S and |G|^2; `value` is their ratio."""

    def __init__(self) -> None:
        self.variance = self.square = 0.0
        self._first: Tensor | None = None
        self._part = self._parts = 0.0

    def see(self, first: Tensor) -> None:
        """The square norm of this process's gradient after the first of several micro-batches."""
        self._first = first

    def mine(self, own: Tensor | float, parts: int) -> list[float]:
        """This process's numbers of a step, to be summed.

        own: the square norm of what it put into the sum of gradients, where it has one micro-batch; parts: its
        micro-batches that hold labels.
        """
        first, self._first = self._first, None
        return [0.0 if first is None else float(first), float(first is not None), float(own), float(parts)]

    def take(self, sums: Sequence[float], scale: float) -> None:
        """The numbers of all processes. scale: of the loss (fp16)."""
        first, samples, own, parts = sums
        mean = first / samples if samples else own / max(parts, 1.0)
        # A part's gradient is divided by the count of the whole step.
        self._part, self._parts = parts**2 * mean / scale**2, parts

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
