"""The head: a decoder's output projection as objectives take it, with a vocabulary that may be divided over ranks."""

from __future__ import annotations

from torch import Tensor

from unmask.kernels import Projection, linear_cross_entropy, linear_log_probs, linear_logits


class Head(Projection):
    """See `unmask.objectives.Head` for what it is asked, `Projection` for what it holds."""

    def cross_entropy(
        self, hidden: Tensor, label: Tensor, weight: Tensor, exclude: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(hidden, self, label, weight, exclude)

    def log_probs(self, hidden: Tensor, label: Tensor, exclude: int | None = None) -> Tensor:
        return linear_log_probs(hidden, self, label, exclude)

    def logits(self, hidden: Tensor, exclude: int | None = None) -> Tensor:
        return linear_logits(hidden, self, exclude)
