"""DiffusionGemma's fine-tuning: canvases under uniform noise, and the next token of the clean stream.

    t ~ U(1e-3, 1) per canvas;   each supervised token of it becomes, with probability t, a uniform id of the vocabulary
    loss = sum over supervised canvas tokens of -log p(x_i | canvas at noise t, clean before it) / their number
         + encoder_weight * sum over clean targets of -log q(x_{i+1} | x_0 .. x_i) / their number

There is no mask token: a noised token may keep its id, every supervised token is predicted by its own row, and no
weight depends on t. p is the decoder, q the encoder: the same layers read a document's clean rows, causally, and its
canvases, whose rows see the clean rows before the canvas and all of it. Canvases are counted from the start of a
response (a run of supervised tokens); the last one is filled with end tokens, which are supervised too.

Self-conditioning: a document's canvases run once without a signal and without gradient; with probability
`self_conditioning`, drawn per document, the second pass adds what the first predicted (soft embeddings) to theirs.

Source: DiffusionGemma's published fine-tuning. There one canvas of a response is scored at a time; here all are, on one
clean stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from unmask.errors import UserError
from unmask.objectives.base import Decoding, Objective
from unmask.objectives.levels import independent, stratified
from unmask.objectives.noise import MASK, SIGNAL, TOKEN, generator, uniform
from unmask.objectives.streams import clean_stream, following
from unmask.rows import IGNORE, Document, Rows, Stream, assemble


class Canvases(NamedTuple):
    """The canvases of a document, tokens in their order: token, position, start (of a token's canvas) int64 [m];
    unit int64 [m], which canvas; supervised bool [m]; units: how many there are."""

    token: np.ndarray
    position: np.ndarray
    start: np.ndarray
    unit: np.ndarray
    units: int

    @classmethod
    def of(cls, document: Document, size: int, end_token: int | None) -> Canvases:
        """Every run of supervised tokens in canvases of `size`; end_token: what the last one is filled with, if it
        is."""
        edge = np.flatnonzero(np.diff(np.r_[False, document.supervised, False].astype(np.int8)))
        position, start, token = [], [], []
        for first, stop in zip(edge[::2], edge[1::2], strict=True):
            short = 0 if end_token is None else -(stop - first) % size
            index = np.arange(first, stop + short)
            position.append(index)
            start.append(first + (index - first) // size * size)
            token.append(np.r_[document.token[first:stop], np.full(short, end_token or 0)])
        if not position:
            nothing = np.empty(0, np.int64)
            return cls(nothing, nothing, nothing, nothing, 0)
        begin = np.concatenate(start)
        unit = np.cumsum(np.r_[True, begin[1:] != begin[:-1]]) - 1
        return cls(np.concatenate(token).astype(np.int64), np.concatenate(position), begin, unit, int(unit[-1]) + 1)


class Levels(NamedTuple):
    """u in [0, 1) of a document's canvases, float64 [draws, canvases]; encoder: the weight of a clean target, which
    makes the encoder's mean over the step one beside the decoder's."""

    canvas: np.ndarray
    encoder: float


class DiffusionGemma(Objective):
    """See the module. Denominator: the canvas tokens of the step, times `draws`."""

    #: Tokens in a canvas; empty: the model's.
    block_size: int | None = Field(default=None, ge=1)
    #: `stratified`: one per canvas, spread over all canvases of the step; `canvas`: one per canvas, independent.
    noise_levels: Literal["stratified", "canvas"] = "stratified"
    #: The lowest noise level.
    eps: float = Field(default=1e-3, ge=0, lt=1)
    #: Probability that a document's canvases are conditioned on the predictions of a first pass; 0: no first pass.
    self_conditioning: float = Field(default=0.5, ge=0, le=1)
    #: Weight of the encoder's next-token loss; 0: the clean stream is context only.
    encoder_weight: float = Field(default=1.0, ge=0)
    #: Labels of the encoder's loss: all tokens of a document, as published, or the supervised ones.
    encoder_targets: Literal["all", "supervised"] = "all"
    #: What the last canvas of a response is filled with: end tokens, or nothing (then it is shorter).
    fill: Literal["end", "none"] = "end"

    #: Filled in from the model when a run starts; not options.
    vocabulary: int | None = Field(default=None, exclude=True)
    end_token_id: int | None = Field(default=None, exclude=True)

    def unused(self) -> dict[str, str]:
        return {} if self.encoder_weight else {"encoder_targets": "an encoder_weight above 0"}

    def bind(self, model: Any, tokenizer: Any, mask_token_id: int | None) -> DiffusionGemma:
        """UserError for a model without self-conditioning, and for one without an end token to fill canvases with."""
        if not getattr(model.base_model, "self_conditions", False):
            raise UserError(
                f"objective.name=diffusion_gemma trains DiffusionGemma, and the model is {type(model).__name__}: use "
                f"block_diffusion or another objective"
            )
        config = model.config
        end = getattr(tokenizer, "eos_token_id", None)
        end = config.get_text_config().eos_token_id if end is None else end
        end = end[0] if isinstance(end, list) and end else end
        if self.fill == "end" and not isinstance(end, int):
            raise UserError("objective.fill=end: neither tokeniser nor model knows an end token; set fill: none")
        size = self.block_size or config.canvas_length
        vocabulary = model.get_input_embeddings().num_embeddings
        return self.model_copy(update={"block_size": size, "vocabulary": vocabulary, "end_token_id": end})

    @property
    def places_mask(self) -> bool:
        return False

    @property
    def second_pass(self) -> bool:
        return self.self_conditioning > 0

    @property
    def decoding(self) -> Decoding:
        return Decoding("canvas", self.block_size, False, True)

    def levels(self, documents: Sequence[Document], seed: int) -> list[Any]:
        """Levels of every document of a step."""
        canvases = [self._canvases(document) for document in documents]
        units, samples = [each.units for each in canvases], [document.sample for document in documents]
        if self.noise_levels == "stratified":
            levels = stratified(units, samples, self.draws, seed)
        else:
            levels = [independent(*each, self.draws, seed) for each in zip(units, samples, strict=True)]
        noisy = self.draws * sum(len(each.token) for each in canvases)
        clean = sum(int(self._targets(document).sum()) for document in documents)
        weight = self.encoder_weight * noisy / max(clean, 1)
        return [Levels(level, weight) for level in levels]

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        levels = self.levels(documents, seed) if levels is None else levels
        streams, total = [], 0.0
        for document, level in zip(documents, levels, strict=True):
            target = self._targets(document) if level.encoder else np.zeros(len(document), bool)
            label = np.where(target, np.append(document.token[1:], IGNORE)[: len(document)], IGNORE)
            clean = clean_stream(document, 1, label, np.where(target, level.encoder, 0.0))
            canvases = self._canvases(document)
            streams.append((clean, self._noisy(document, canvases, seed, level.canvas)))
            total += self.draws * float(len(canvases.token))
        return assemble(streams, total)

    def _canvases(self, document: Document) -> Canvases:
        if self.block_size is None:
            raise ValueError("the objective knows no canvas: bind it to a model with objective.bind(...)")
        return Canvases.of(document, self.block_size, self.end_token_id if self.fill == "end" else None)

    def _targets(self, document: Document) -> np.ndarray:
        """The clean rows that predict the token after them, bool [n]."""
        return following(np.ones(len(document), bool) if self.encoder_targets == "all" else document.supervised)

    def _noisy(self, document: Document, canvases: Canvases, seed: int, level: np.ndarray) -> Stream | None:
        """The canvases at their noise levels, `draws` times."""
        if self.vocabulary is None:
            raise ValueError("the objective knows no vocabulary: bind it to a model with objective.bind(...)")
        size, draws = len(canvases.token), self.draws
        if not size:
            return None
        t = self.eps + (1.0 - self.eps) * level
        noised = uniform(seed, document.sample, draws, size, MASK) < t[:, canvases.unit]
        drawn = [
            generator(seed, document.sample, draw, TOKEN).integers(0, self.vocabulary, size) for draw in range(draws)
        ]
        conditioned = generator(seed, document.sample, purpose=SIGNAL).random() < self.self_conditioning
        instance = canvases.unit + canvases.units * np.arange(draws)[:, None]
        return Stream(
            token=np.where(noised, np.stack(drawn), canvases.token).ravel(),
            position=np.tile(canvases.position, draws),
            lo=np.zeros(draws * size, np.int64),
            hi=np.tile(canvases.start, draws),
            label=np.tile(canvases.token, draws),
            weight=np.ones(draws * size),
            block=instance.ravel(),
            signal=np.full(draws * size, int(conditioned)),
        )
