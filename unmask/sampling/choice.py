"""Which token each masked position would take, and what a strategy may know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.sampling.options import Options


@dataclass(frozen=True)
class Candidates:
    """What the n open positions of a step would become.

    token: int64 [n], the token drawn for each; confidence: float [n], its probability under the model; probability:
    [n, vocabulary], the model's distribution (before temperature, top_p and top_k, unless `tempered`);
    order: [n] in [0, 1), random numbers for ties of chance.
    """

    token: Tensor
    confidence: Tensor
    probability: Tensor
    order: Tensor

    def __len__(self) -> int:
        return len(self.token)


def draw(logits: Tensor, options: Options, uniform: Tensor) -> Candidates:
    """A token for every row. logits [n, vocabulary]; uniform [2, n] in [0, 1).

    The first row of `uniform` decides the draw (inverse of the cumulative distribution, most probable token first), the
    second is `order`. Temperature, then top-p, then top-k shape the draw (at temperature 0 the most probable token is
    taken, whatever they are); the confidence is the unshaped probability, unless `options.tempered`.
    """
    uniform = uniform.to(logits.device)
    probability = logits.softmax(-1)
    if options.temperature == 0 and not (options.tempered and options.filters):
        confidence, token = probability.max(-1)
        return Candidates(token, confidence, probability, uniform[1])
    tempered, order = (logits / (options.temperature or 1.0)).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = tempered.cumsum(-1) - tempered
    nucleus = tempered.masked_fill(before >= options.top_p, 0.0)
    if options.top_k is not None and options.top_k < nucleus.shape[-1]:
        # With all that are as probable as the last one.
        nucleus = nucleus.masked_fill(nucleus < nucleus[:, options.top_k - 1, None], 0.0)
    kept = nucleus.cumsum(-1)
    target = (uniform[0].to(kept.dtype) * kept[:, -1])[:, None]
    rank = torch.searchsorted(kept, target, right=True).clamp(max=kept.shape[-1] - 1)
    token = order.gather(-1, rank) if options.temperature else order[:, :1]
    if options.tempered:
        probability = torch.zeros_like(probability).scatter(-1, order, nucleus / nucleus.sum(-1, keepdim=True))
    return Candidates(token[:, 0], probability.gather(-1, token)[:, 0], probability, uniform[1])
