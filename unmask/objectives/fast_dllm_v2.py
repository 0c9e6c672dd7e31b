"""Fast-dLLM v2: block diffusion with complementary views and next-token rows (Wu et al. 2509.26328).

    p ~ (1 - eps) U + eps per block;   view 0 masks a response token with probability p, view 1 exactly the others,
    loss = sum over views v, rows i with token i+1 masked in v, of -log p(x_{i+1} | block of i in v, clean before it)
           / number of supervised tokens but position 0

Both views of a block share one clean, block-causal stream. A noisy row predicts the token after it, as the AR model it
started from did, across block edges too: the last row of a block predicts the first token of the next. So every
supervised target but position 0 is scored exactly once, and the weight is 1. A block has an instance where one of its
rows may have a label; that can be a block of the prompt, when the response starts at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from unmask.objectives.annealing import Annealed
from unmask.objectives.base import Decoding, needs_mask
from unmask.objectives.levels import independent, stratified
from unmask.objectives.masking import bernoulli, exact_count
from unmask.objectives.noise import MASK, uniform
from unmask.objectives.streams import Grid, clean_stream, following, noisy_stream, scored
from unmask.rows import Document, Rows, assemble


class FastDLLMv2(Annealed):
    """Complementary views of every block; `draws` counts independent pairs of views, each in the denominator."""

    #: Tokens in a block.
    block_size: int = Field(default=32, ge=1)
    #: The lowest mask probability.
    eps: float = Field(default=1e-3, ge=0, lt=1)
    #: `block`: one per block, independent (as published); `stratified`: spread over all blocks of the step.
    noise_levels: Literal["block", "stratified"] = "block"

    @property
    def decoding(self) -> Decoding:
        return Decoding("block", self.block_size, True)

    def levels(self, documents: Sequence[Document], seed: int) -> list[Any]:
        """u in [0, 1) of every block that holds a token to mask, float64 [draws, blocks] for each document."""
        units = [Grid.over(self._candidate(document), self.block_size).units for document in documents]
        samples = [document.sample for document in documents]
        if self.noise_levels == "stratified":
            return stratified(units, samples, self.draws, seed)
        return [independent(count, sample, self.draws, seed) for count, sample in zip(units, samples, strict=True)]

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        levels = self.levels(documents, seed) if levels is None else levels
        mask_token, streams, total = needs_mask(self), [], 0.0
        for document, level in zip(documents, levels, strict=True):
            candidate = self._candidate(document)
            target = following(candidate)  # by the row that predicts it
            unit = Grid.over(candidate, self.block_size).unit
            number = uniform(seed, document.sample, self.draws, len(document), MASK)
            p = self.eps + (1.0 - self.eps) * level
            mask = bernoulli(number, p[:, unit], candidate) if level.size else np.zeros(number.shape, bool)
            views = np.concatenate([mask, candidate & ~mask])  # [2 * draws, n]
            label, weight = scored(document.token, views, np.ones(views.shape), shift=True)
            token = np.where(views, mask_token, document.token)
            noisy = noisy_stream(token, label, weight, Grid.over(target, self.block_size), True, self.ahead)
            streams.append((clean_stream(document, self.block_size), noisy))
            total += self.draws * float(target.sum())
        return assemble(streams, total)

    def evaluation(self) -> FastDLLMv2:
        """See FastDLLMv2Bound."""
        return FastDLLMv2Bound(**self.model_dump() | {"noise_levels": "stratified"}, mask_token_id=self.mask_token_id)

    def _candidate(self, document: Document) -> np.ndarray:
        """The tokens that may be masked, bool [n]."""
        return document.supervised


class FastDLLMv2Bound(FastDLLMv2):
    """The likelihood bound of the model as it is decoded, with exact-count noise.

    The first token of a block is predicted by the last clean row of the block before it, which has seen everything up
    to itself: exact, weight 1. Given it, k ~ U{1..n} of the n other supervised tokens of the block are masked in one
    noisy instance, where row i predicts token i+1, with weight n / k. Then sum / count is, in expectation, at least
    -log p(scored tokens | the others) / their number, by the chain rule over first tokens and rests of blocks, p inside
    a rest being the mixture over random orders. Scored is every supervised token but position 0, once. Blocks of
    one token give the exact autoregressive likelihood.
    """

    def evaluation(self) -> FastDLLMv2:
        return self

    @property
    def clean_size(self) -> int:
        """Blocks of the clean rows: 1 is causal."""
        return self.block_size

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        levels = self.levels(documents, seed) if levels is None else levels
        mask_token, streams, total = needs_mask(self), [], 0.0
        for document, level in zip(documents, levels, strict=True):
            rest = self._candidate(document)
            grid = Grid.over(rest, self.block_size)
            number = uniform(seed, document.sample, self.draws, len(document), MASK)
            mask, weight = exact_count(number, level, grid.unit, rest)
            label, weight = scored(document.token, mask, weight, shift=True)
            noisy = noisy_stream(np.where(mask, mask_token, document.token), label, weight, grid, context=True)
            first = (document.supervised & ~rest)[None]
            label, weight = scored(document.token, first, np.full(first.shape, float(self.draws)), shift=True)
            streams.append((clean_stream(document, self.clean_size, label[0], weight[0]), noisy))
            total += self.draws * float(following(document.supervised).sum())
        return assemble(streams, total)

    def _candidate(self, document: Document) -> np.ndarray:
        return document.supervised & (np.arange(len(document)) % self.block_size > 0)
