"""Masked diffusion over whole documents: MDLM, LLaDA, Dream, DiffuLLaMA.

    t ~ (1 - eps) U + eps per document,   every supervised token masked with probability p(t),
    loss = sum over masked i of w * -log p(x_i | x_t) / denominator,      w = 1 / t for the likelihood bound

One noisy block per document and draw, seen by itself as a whole; no clean rows. Prompt tokens are never masked and
never scored. With `shift`, row i - 1 predicts token i, as in the AR model that a Dream or DiffuLLaMA starts from.

Sources: MDLM, Sahoo et al. 2406.07524; LLaDA, Nie et al. 2502.09992; Dream, Ye et al. 2508.15487; DiffuLLaMA, Gong et
al. 2410.17891.

| variant     | levels     | eps  | weight  | denominator | shift | also                                            |
|-------------|------------|------|---------|-------------|-------|-------------------------------------------------|
| mdlm        | antithetic | 1e-3 | inverse | tokens      | no    | the mask token's logit is excluded (SUBS)       |
| llada       | uniform    | 1e-3 | inverse | tokens      | no    | 1 % of documents cut to a random length         |
| llada_sft   | uniform    | 1e-3 | inverse | document    | no    |                                                 |
| dream       | uniform    | 0    | cart    | masked      | yes   | cart_q 0.8 is the paper's, 0.1 the shipped code |
| diffullama  | uniform    | 1e-3 | inverse | masked      | yes   | `anneal` is its attention annealing             |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from unmask.objectives.annealing import Annealed
from unmask.objectives.base import Decoding, needs_mask
from unmask.objectives.cart import cart
from unmask.objectives.denominators import Counts, Denominator, share
from unmask.objectives.levels import independent, stratified
from unmask.objectives.masking import bernoulli, exact_count
from unmask.objectives.noise import LENGTH, MASK, generator, uniform
from unmask.objectives.schedule import Schedule, likelihood_weight, mask_probability
from unmask.objectives.streams import Grid, following, noisy_stream, scored
from unmask.rows import IGNORE, Document, Rows, assemble


class MDLM(Annealed):
    """Masked diffusion over whole documents; `variant` sets the defaults of the table above."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "mdlm": {},
        "llada": {"noise_levels": "uniform", "random_length": 0.01, "exclude_mask": False},
        "llada_sft": {"noise_levels": "uniform", "denominator": "document", "exclude_mask": False},
        "dream": {
            "noise_levels": "uniform",
            "eps": 0.0,
            "weight": "cart",
            "denominator": "masked",
            "shift": True,
            "exclude_mask": False,
        },
        "diffullama": {"noise_levels": "uniform", "denominator": "masked", "shift": True, "exclude_mask": False},
    }

    #: Published recipe, which sets the defaults of the other options.
    variant: str = "mdlm"
    #: `uniform`: one per document, independent (LLaDA, Dream); `antithetic`: spread over those of the step (MDLM).
    noise_levels: Literal["uniform", "antithetic"] = "antithetic"
    #: The lowest noise level.
    eps: float = Field(default=1e-3, ge=0, lt=1)
    #: How the probability of a mask follows from the noise level.
    schedule: Schedule = "linear"
    #: `inverse`: the likelihood's, 1/t when linear (MDLM, LLaDA); `flat`: 1; `cart`: by visible context (Dream).
    weight: Literal["inverse", "flat", "cart"] = "inverse"
    #: Added to the inverse weight's denominator (dllm: 1e-6).
    weight_offset: float = Field(default=0.0, ge=0)
    #: Parameter of the geometric distribution of `cart`.
    cart_q: float = Field(default=0.8, gt=0, lt=1)
    #: What the loss is divided by, see `denominators`.
    denominator: Denominator = "tokens"
    #: Row i - 1 predicts token i (Dream, DiffuLLaMA); position 0 then has no loss.
    shift: bool = False
    #: The mask token's logit is -inf in the loss (MDLM's SUBS).
    exclude_mask: bool = True
    #: Probability that a document is cut to a uniform random length (LLaDA cuts 1 % of its batches).
    random_length: float = Field(default=0.0, ge=0, le=1)

    def unused(self) -> dict[str, str]:
        needs = {"cart_q": "cart", "weight_offset": "inverse"}
        return {option: f"weight: {weight}" for option, weight in needs.items() if self.weight != weight}

    @property
    def decoding(self) -> Decoding:
        return Decoding("full", None, self.shift)

    @property
    def excluded_token(self) -> int | None:
        return needs_mask(self) if self.exclude_mask else None

    def levels(self, documents: Sequence[Document], seed: int) -> list[Any]:
        """u in [0, 1) of every document, float64 [draws, 1] ([draws, 0] where nothing can be masked)."""
        units = [int(self._candidate(self._cut(document, seed)).any()) for document in documents]
        samples = [document.sample for document in documents]
        if self.noise_levels == "antithetic":
            return stratified(units, samples, self.draws, seed)
        return [independent(unit, sample, self.draws, seed) for unit, sample in zip(units, samples, strict=True)]

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        levels = self.levels(documents, seed) if levels is None else levels
        mask_token, streams, total = needs_mask(self), [], 0.0
        for whole, level in zip(documents, levels, strict=True):
            document = self._cut(whole, seed)
            supervised = document.supervised
            candidate = self._candidate(document)
            grid = Grid.over(candidate, None)
            mask, weight = self._noise(document.sample, candidate, seed, level)
            label, weight = scored(document.token, mask, weight, self.shift)
            predictable = following(supervised) if self.shift else supervised
            counts = Counts(len(document), int(supervised.sum()), int(predictable.sum()), int((label != IGNORE).sum()))
            scale, count = share(self.denominator, counts, self.draws)
            token = np.where(mask, mask_token, document.token)
            streams.append((None, noisy_stream(token, label, scale * weight, grid, False, self.ahead)))
            total += count
        return assemble(streams, total)

    def evaluation(self) -> MDLM:
        """See MDLMBound."""
        given = self.model_dump() | {"denominator": "scored", "noise_levels": "antithetic", "random_length": 0.0}
        return MDLMBound(**given, mask_token_id=self.mask_token_id)

    def _candidate(self, document: Document) -> np.ndarray:
        """The tokens that may be masked, bool [n]."""
        return document.supervised

    def _noise(self, sample: int, candidate: np.ndarray, seed: int, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mask, weight), [draws, n], of a document from its levels."""
        number = uniform(seed, sample, self.draws, len(candidate), MASK)
        if not level.size:
            return np.zeros(number.shape, bool), np.zeros(number.shape)
        t = self.eps + (1.0 - self.eps) * level  # [draws, 1]
        mask = bernoulli(number, mask_probability(self.schedule, t), candidate)
        if self.weight == "cart":
            return mask, cart(mask, self.cart_q)
        weight = np.ones_like(t)
        if self.weight == "inverse":
            # t = 0 (eps 0) masks nothing, so its infinite weight meets no token.
            weight = likelihood_weight(self.schedule, np.maximum(t, 1e-12), self.weight_offset)
        return mask, np.broadcast_to(weight, mask.shape)

    def _cut(self, document: Document, seed: int) -> Document:
        if not self.random_length or not len(document):
            return document
        chance = generator(seed, document.sample, purpose=LENGTH)
        if chance.random() >= self.random_length:
            return document
        length = int(chance.integers(1, len(document) + 1))
        return replace(document, token=document.token[:length], supervised=document.supervised[:length])


class MDLMBound(MDLM):
    """The likelihood bound of a masked diffusion model over whole documents, with exact-count noise.

    k ~ U{1..n} of a document's n scored tokens are masked, each with weight n / k. Then sum / count is, in expectation,
    at least -log p(scored tokens | the document's other tokens) / n, p being the mixture, over random orders of
    the scored tokens, of the model's own conditionals. Scored are the supervised tokens; with `shift` position 0 has no
    row to predict it, stays visible and is conditioned on. `weight`, its offset, `eps` and `schedule` play no part: the
    bound is the same for every schedule.
    """

    def evaluation(self) -> MDLM:
        return self

    def _candidate(self, document: Document) -> np.ndarray:
        candidate = document.supervised.copy()
        candidate[:1] &= not self.shift
        return candidate

    def _noise(self, sample: int, candidate: np.ndarray, seed: int, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = uniform(seed, sample, self.draws, len(candidate), MASK)
        return exact_count(number, level, np.zeros(len(candidate), np.int64), candidate)
