"""Which token a masked position would take, and which positions are sure enough to take it."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.sampling.options import Options


def draw(logits: Tensor, options: Options, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token for every row and the model's probability of it: int64 [n] and float [n].

    logits [n, vocabulary]; uniform [n] in [0, 1) decides the draw (inverse of the cumulative distribution, most
    probable token first). Temperature and top-p shape the draw; the confidence is the untempered probability.
    """
    probability = logits.softmax(-1)
    if options.temperature == 0:
        confidence, token = probability.max(-1)
        return token, confidence
    tempered, order = (logits / options.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = tempered.cumsum(-1) - tempered
    kept = tempered.masked_fill(before >= options.top_p, 0.0).cumsum(-1)
    target = (uniform.to(kept.dtype) * kept[:, -1])[:, None]
    rank = torch.searchsorted(kept, target, right=True).clamp(max=kept.shape[-1] - 1)
    token = order.gather(-1, rank)
    return token[:, 0], probability.gather(-1, token)[:, 0]


def confident(confidence: Tensor, threshold: float, at_least: int) -> Tensor:
    """Indices to commit: all above the threshold, and in any case the `at_least` most confident."""
    order = confidence.argsort(descending=True, stable=True)
    return order[: max(at_least, int((confidence > threshold).sum()))]
