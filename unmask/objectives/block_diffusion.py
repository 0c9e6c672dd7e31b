"""Block diffusion: autoregressive over blocks, masked diffusion inside each (BD3LM, SDAR, LLaDA2, dllm's A2D recipe).

    log p(x) = sum over blocks b of log p(x_b | x_<b),
    loss     = sum over blocks, masked i in b, of w(t_b) * -log p(x_i | x_b at noise t_b, clean x_<b) / denominator

Rows of a document: its clean rows, block-causal, and for every draw one noisy instance of every block that holds a
supervised token. A noisy row sees the clean rows from the document's start to its block's start, and its own block;
never the clean copy of its block, which would turn the bound into copying. The grid counts from the document's start
and the last block may be shorter. Prompt tokens inside a noisy block stay as they are.

Sources: BD3LM, Arriola et al. 2503.09573; SDAR, Cheng et al. 2510.06303; LLaDA2, Bie et al. 2512.15745; the A2D recipe
of the dllm library (one level per sequence, weight 1 / (t + 1e-6)).

| variant | levels                          | clip       | weight  | denominator | also                               |
|---------|---------------------------------|------------|---------|-------------|------------------------------------|
| bd3lm   | per block, spread over the step | (1e-3, 1)  | bd3lm   | supervised  | mask token's logit excluded (SUBS) |
| sdar    | per document                    | (1e-3, 1)  | inverse | supervised  | at least one mask; block 4         |
| llada2  | per document                    | (0.3, 0.8) | flat    | masked      | pre-training takes (1e-3, 1)       |
| a2d     | per document                    | (1e-3, 1)  | inverse | supervised  | weight_offset 1e-6                 |
| nemotron | per block                      | (1e-3, 1)  | inverse | scored      | AR loss on the clean rows too      |

With `clean_loss` the clean rows, which must then be causal, are also trained as the autoregressive model that they are:

    loss = noisy_loss * (the loss above) + clean_loss * sum over clean rows i of -log p(x_{i+1} | x_0 .. x_i) / the same

Both count the same tokens, every supervised one but position 0, so that each is a mean (`nemotron`, and without noise
`i_dlm`).

With `confidence` the loss of a masked token is w * (-log p(x_i) + confidence * [x_i is the most probable] * H_i), H_i
the entropy of its prediction. The sum is divided as the loss is, by what is known before any pass (LLaDA2 divides this
term by the tokens that are right).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from unmask.objectives.annealing import Annealed
from unmask.objectives.base import Decoding, LabelledRows, LossTerms, needs_mask
from unmask.objectives.block_schedule import BlockSize, Phase, checked, size_at
from unmask.objectives.clip import FULL, best_clip
from unmask.objectives.denominators import Counts, Denominator, share
from unmask.objectives.levels import independent, stratified
from unmask.objectives.masking import at_least_one, bernoulli, exact_count, redrawn
from unmask.objectives.noise import MASK, generator
from unmask.objectives.schedule import Schedule, likelihood_weight, mask_probability
from unmask.objectives.streams import Grid, clean_stream, noisy_stream, scored
from unmask.rows import IGNORE, Document, Rows, Stream, assemble

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.kernels import Head


def _window(value: Any) -> Any:
    if value in ("auto", None):
        return value
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a window of noise levels: give [emin, emax], or auto") from None
    if not 0 < low <= high <= 1:
        raise ValueError(f"{list(value)} is not a window of noise levels: 0 < emin <= emax <= 1 must hold")
    return low, high


Window = Annotated[tuple[float, float], BeforeValidator(_window)]


class BlockDiffusion(Annealed):
    """Block diffusion; `variant` sets the defaults of the table above."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "bd3lm": {},
        "sdar": {
            "block_size": 4,
            "noise_levels": "document",
            "weight": "inverse",
            "at_least_one": True,
            "exclude_mask": False,
        },
        "llada2": {
            "noise_levels": "document",
            "clip": (0.3, 0.8),
            "weight": "flat",
            "denominator": "masked",
            "exclude_mask": False,
        },
        "a2d": {"noise_levels": "document", "weight": "inverse", "weight_offset": 1e-6, "exclude_mask": False},
        "nemotron": {
            "noise_levels": "block",
            "weight": "inverse",
            "exclude_mask": False,
            "clean": "causal",
            "keep_first": True,
            "denominator": "scored",
            "noisy_loss": 0.3,
            "clean_loss": 1.0,
        },
    }

    #: Published recipe, which sets the defaults of the other options.
    variant: str = "bd3lm"
    #: Tokens in a block, or `full`: one noisy block per document and no clean rows.
    block_size: BlockSize = 32
    #: Phases [{until: fraction or step, size: tokens or full}, ...] that replace block_size (LLaDA2).
    block_schedule: tuple[Phase, ...] | None = None
    #: `stratified`: per block, spread over all blocks of a step (BD3LM); `block`: per block; `document`: per document.
    noise_levels: Literal["stratified", "block", "document"] = "stratified"
    #: Window (emin, emax) of noise levels; `auto`: adapted at every evaluation (BD3LM, see `clip`).
    clip: Annotated[Literal["auto"] | tuple[float, float], BeforeValidator(_window)] = FULL
    #: The current window of `clip: auto`, set by the run; a value given here is where the run starts.
    window: Window | None = None
    #: How the probability of a mask follows from the noise level.
    schedule: Schedule = "linear"
    #: `inverse`: -alpha'/(1-alpha), 1/t when linear; `bd3lm`: the same, but 1 when emin > 0.5; `flat`: 1.
    weight: Literal["inverse", "bd3lm", "flat"] = "bd3lm"
    #: Added to the inverse weight's denominator (dllm: 1e-6).
    weight_offset: float = Field(default=0.0, ge=0)
    #: What the loss is divided by, see `denominators`.
    denominator: Denominator = "supervised"
    #: The mask token's logit is -inf in the loss (SUBS: MDLM, BD3LM).
    exclude_mask: bool = True
    #: If a draw masks nothing in a document, mask the token with the smallest random number (SDAR draws again).
    at_least_one: bool = False
    #: Draw a block again while its masked fraction lies outside the window (BD3LM's `resample`).
    redraw: bool = False
    #: Keep a document's position 0 clean; training still counts it in the denominator, evaluation does not (BD3LM).
    keep_first: bool = False
    #: Which clean rows a clean row attends to: up to the end of its block, or only those before it and itself.
    clean: Literal["block_causal", "causal"] = "block_causal"
    #: Weight of the noisy blocks' loss (Nemotron: 0.3).
    noisy_loss: float = Field(default=1.0, gt=0)
    #: Weight of the autoregressive loss on causal clean rows; 0: they are context only (Nemotron: 1).
    clean_loss: float = Field(default=0.0, ge=0)
    #: Weight of the entropy of masked tokens that are already predicted correctly (LLaDA2's confidence term).
    confidence: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> BlockDiffusion:
        if self.block_schedule is not None:
            checked(self.block_schedule)
        if self.clean_loss and (self.clean, self.keep_first, self.denominator) != ("causal", True, "scored"):
            raise ValueError(
                "clean_loss trains causal clean rows over the same tokens as the noisy blocks: it needs clean: causal, "
                "keep_first: true and denominator: scored (variant: nemotron sets them)"
            )
        if self.clean_loss and self.confidence:
            raise ValueError("confidence is of masked tokens, and clean_loss adds others: leave one of them out")
        if self.clean_loss and "full" in {self.block_size, *(phase.size for phase in self.block_schedule or ())}:
            raise ValueError("clean_loss needs clean rows, and blocks of size full have none")
        return self

    def unused(self) -> dict[str, str]:
        low, high = FULL if self.clip == "auto" else self.clip
        auto, narrow = self.clip == "auto", low > FULL[0] or high < FULL[1]
        flat = self.weight == "flat" or (self.weight == "bd3lm" and low > 0.5)
        sizes = {phase.size for phase in self.block_schedule or ()} or {self.block_size}
        used = {
            "window": (auto, "clip: auto"),
            "redraw": (auto or narrow, "a clip inside of [0.001, 1]"),
            "weight_offset": (not flat, "a weight that is not flat"),
            "clean": (sizes != {"full"}, "clean rows, and with block_size: full there are none"),
            "block_size": (not self.block_schedule, "block_schedule, which replaces it, to be left out"),
        }
        return {option: needs for option, (is_used, needs) in used.items() if not is_used}

    @property
    def size(self) -> int | Literal["full"]:
        """The block size the model is trained for in the end: the schedule's last, or block_size."""
        return self.block_schedule[-1].size if self.block_schedule else self.block_size

    def settled(self) -> dict[str, Any]:
        """With the last size of a block_schedule, and the window that `clip: auto` has come to."""
        options = super().settled()
        if options.pop("block_schedule", None):
            options["block_size"] = self.size
        if options.pop("window", None) and self.clip == "auto":
            options["clip"] = list(self.span)
        return options

    @property
    def span(self) -> tuple[float, float]:
        """The window (emin, emax) that noise levels are drawn from now."""
        return (self.window or FULL) if self.clip == "auto" else self.clip

    @property
    def decoding(self) -> Decoding:
        if self.size == "full":
            return Decoding("full", None, False)
        return Decoding("block", self.size, False, self.clean == "causal")

    @property
    def excluded_token(self) -> int | None:
        return needs_mask(self) if self.exclude_mask else None

    def at(self, step: int, steps: int) -> BlockDiffusion:
        """The objective with the block size that block_schedule gives `step` of `steps`."""
        present = super().at(step, steps)
        if self.block_schedule is None:
            return present
        size = size_at(self.block_schedule, step, steps)
        return present.model_copy(update={"block_size": size, "block_schedule": None})

    def moving(self, step: int, steps: int) -> dict[str, Any]:
        """The block size under a block_schedule, and what `anneal` moves."""
        moving = super().moving(step, steps)
        if self.block_schedule is not None:
            moving["block_size"] = size_at(self.block_schedule, step, steps)
        return moving

    def reclip(self, level: np.ndarray, loss: np.ndarray) -> BlockDiffusion:
        """With `clip: auto`, the objective with the window of lowest loss variance; otherwise itself."""
        return self.model_copy(update={"window": best_clip(level, loss)}) if self.clip == "auto" else self

    def levels(self, documents: Sequence[Document], seed: int) -> list[Any]:
        """u in [0, 1) of every noised block, float64 [draws, blocks], or of every document, [draws, 1]."""
        units = [self._grid(document).units for document in documents]
        samples = [document.sample for document in documents]
        if self.noise_levels == "stratified":
            return stratified(units, samples, self.draws, seed)
        if self.noise_levels == "document":
            units = [min(count, 1) for count in units]
        return [independent(count, sample, self.draws, seed) for count, sample in zip(units, samples, strict=True)]

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        levels = self.levels(documents, seed) if levels is None else levels
        mask_token, streams, total = needs_mask(self), [], 0.0
        context = self.size != "full"
        clean_size = self.size if self.size != "full" and self.clean == "block_causal" else 1
        for document, level in zip(documents, levels, strict=True):
            grid = self._grid(document)
            mask, weight = self._noise(document, grid, seed, level)
            label, weight = scored(document.token, mask, weight, shift=False)
            counts = Counts(
                tokens=len(document),
                supervised=int(document.supervised.sum()),
                scored=int(self._candidate(document).sum()),
                masked=int((label != IGNORE).sum()),
            )
            scale, count = share(self.denominator, counts, self.draws)
            token = np.where(mask, mask_token, document.token)
            noisy = noisy_stream(token, label, self.noisy_loss * scale * weight, grid, context, self.ahead)
            streams.append((self._clean(document, clean_size) if context else None, noisy))
            total += count
        return assemble(streams, total)

    def evaluation(self) -> BlockDiffusion:
        """See BlockDiffusionBound."""
        alone = {"noisy_loss": 1.0, "clean_loss": 0.0, "confidence": 0.0}
        given = self.model_dump() | {"denominator": "scored", "noise_levels": "stratified"} | alone
        return BlockDiffusionBound(**given, mask_token_id=self.mask_token_id)

    def loss(self, hidden: Tensor, head: Head, rows: LabelledRows) -> LossTerms:
        """See Objective.loss; with `confidence` more."""
        terms = super().loss(hidden, head, rows)
        if not self.confidence:
            return terms
        from unmask.kernels import entropy_of_correct

        logits = partial(head.logits, exclude=self.excluded_token)
        entropy = entropy_of_correct(hidden, logits, rows.label, rows.weight)
        return terms._replace(sum=terms.sum + self.confidence * entropy)

    def scored_tokens(self, document: Document) -> np.ndarray:
        """The supervised tokens, without position 0 where it is kept clean."""
        return self._candidate(document)

    def _clean(self, document: Document, size: int) -> Stream:
        """The clean rows, in blocks of `size`; with clean_loss each predicts the next supervised token."""
        if not self.clean_loss:
            return clean_stream(document, size)
        target = document.supervised[None]
        weight = np.full(target.shape, self.clean_loss * self.draws)
        label, weight = scored(document.token, target, weight, shift=True)
        return clean_stream(document, size, label[0], weight[0])

    def _candidate(self, document: Document) -> np.ndarray:
        """The tokens that may be masked, bool [n]."""
        if not self.keep_first:
            return document.supervised
        candidate = document.supervised.copy()
        candidate[:1] = False
        return candidate

    def _grid(self, document: Document) -> Grid:
        return Grid.over(self._candidate(document), None if self.size == "full" else self.size)

    def _noise(self, document: Document, grid: Grid, seed: int, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mask, weight), [draws, n], of a document from the levels of its blocks."""
        candidate = self._candidate(document)
        streams = [generator(seed, document.sample, draw, MASK) for draw in range(self.draws)]
        number = np.stack([stream.random(len(document)) for stream in streams])
        if not level.size:
            return np.zeros(number.shape, bool), np.zeros(number.shape)
        low, high = self.span
        t = low + (high - low) * level  # [draws, blocks or 1]
        probability, weight = mask_probability(self.schedule, t), self._weight(t)
        if t.shape[1] > 1:
            probability, weight = probability[:, grid.unit], weight[:, grid.unit]
        mask = bernoulli(number, probability, candidate)
        if self.redraw:

            def again() -> np.ndarray:
                return np.stack([stream.random(len(document)) for stream in streams]) < probability

            mask = redrawn(mask, again, grid.unit, candidate, (low if low > FULL[0] else 0.0, high))
        if self.at_least_one:
            mask = at_least_one(mask, number, candidate)
        return mask, np.broadcast_to(weight, mask.shape)

    def _weight(self, t: np.ndarray) -> np.ndarray:
        if self.weight == "flat" or (self.weight == "bd3lm" and self.span[0] > 0.5):
            return np.ones_like(t)
        return likelihood_weight(self.schedule, t, self.weight_offset)


class BlockDiffusionBound(BlockDiffusion):
    """The likelihood bound of block diffusion, with exact-count noise.

    In every block k ~ U{1..n} of its n scored tokens are masked, each with weight n / k; the k are spread over all
    blocks. Then sum / count is, in expectation, at least -log p(scored tokens | the others) / their number: by the
    chain rule over blocks, each given the clean blocks before it and the unscored tokens inside it, p inside a block
    being the mixture, over random orders, of the model's own conditionals. Scored are the supervised tokens (without
    position 0 when it is kept clean). A clipped training window or `weight` plays no part. Blocks of one token give
    the exact autoregressive likelihood, without noise.
    """

    def evaluation(self) -> BlockDiffusion:
        return self

    def _noise(self, document: Document, grid: Grid, seed: int, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = np.stack(
            [generator(seed, document.sample, draw, MASK).random(len(document)) for draw in range(self.draws)]
        )
        return exact_count(number, level, grid.unit, self._candidate(document))
