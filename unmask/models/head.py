"""The head: a decoder's output projection as objectives take it, with a vocabulary that may be divided over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from unmask.kernels import VocabularyShard, linear_cross_entropy, linear_log_probs, linear_logits


class Head(NamedTuple):
    """See `unmask.objectives.Head`. weight [vocabulary, width], an optional bias [vocabulary] and logit soft-cap.

    shard: which part of the vocabulary weight and bias are, where a group's ranks divide it.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    shard: VocabularyShard | None = None

    def cross_entropy(
        self, hidden: Tensor, label: Tensor, weight: Tensor, exclude: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(hidden, self.weight, label, weight, **self._options(exclude))

    def log_probs(self, hidden: Tensor, label: Tensor, exclude: int | None = None) -> Tensor:
        return linear_log_probs(hidden, self.weight, label, **self._options(exclude))

    def logits(self, hidden: Tensor, exclude: int | None = None) -> Tensor:
        return linear_logits(hidden, self.weight, **self._options(exclude))

    def _options(self, exclude: int | None) -> dict[str, Any]:
        return {"bias": self.bias, "softcap": self.softcap, "exclude": exclude, "shard": self.shard}
