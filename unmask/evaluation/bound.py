"""The likelihood bound: an upper bound, in nats per token, of the negative log-likelihood of held-out documents.

Masked diffusion bounds -log p(x) of a document (or of each block given the blocks before) of L tokens by

    E_k [ L / k * sum over the k masked tokens of -log p(token | the rest) ],   k uniform in 1..L,

the exact-count estimator: k tokens are masked, no more and no less, which scatters less than masking each token with
probability k / L. `objective.evaluation()` draws it, stratified over all documents; for an autoregressive objective
the bound is the likelihood itself. The standard error is over chunks, of the ratio sum(nats) / sum(tokens).

Processes share the packs; their results are put together in the order of the packs, so that every number is that of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from unmask.errors import UserError
from unmask.evaluation.guided import guided, without_prompt
from unmask.objectives import Objective
from unmask.objectives.clip import scored_blocks
from unmask.objectives.levels import bin_of
from unmask.rows import Document

if TYPE_CHECKING:
    from unmask.models import RowModel


@dataclass(frozen=True)
class Bound:
    """nats_per_token +- standard_error (nan for one chunk), over `tokens` scored tokens of `chunks`.

    A chunk is a Document of a pack: a whole document, or a part of one that is longer than a pack.
    """

    nats_per_token: float
    standard_error: float
    tokens: int
    chunks: int

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    def bits_per_byte(self, count: int) -> float:
        """Bits per byte of a text of `count` bytes: see `text_bytes`."""
        return self.bits_per_token * self.tokens / count

    def asdict(self) -> dict[str, float | None]:
        return {
            "nats_per_token": self.nats_per_token,
            "standard_error": None if math.isnan(self.standard_error) else self.standard_error,
            "bits_per_token": self.bits_per_token,
            "tokens": self.tokens,
            "chunks": self.chunks,
        }


@dataclass(frozen=True)
class Level:
    """What was measured at noise levels in [start, stop): the mean -log p of a masked token, in nats, over `blocks`
    noisy blocks, each counted by its scored tokens; `share`: the part of these tokens."""

    start: float
    stop: float
    nats_per_token: float
    standard_error: float
    share: float
    blocks: int

    def asdict(self) -> dict[str, float | None]:
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


class Measured(NamedTuple):
    """A bound, and what each noisy block added to it, float64 [blocks]: its noise level (the masked part of its scored
    tokens), the mean -log p of its masked tokens, and its scored tokens. Blocks of no noise (autoregressive) have none.
    """

    bound: Bound
    level: np.ndarray
    loss: np.ndarray
    size: np.ndarray

    def by_level(self, bins: int) -> list[Level]:
        """Noise levels (0, 1] in `bins` bins of equal width, empty ones left out.

        The levels of blocks are spread evenly, so that the mean over all of them, by tokens, is the bound (but for
        tokens that are predicted without noise).
        """
        place = bin_of(self.level, bins)
        found = []
        for number in np.unique(place):
            inside = place == number
            size = self.size[inside]
            part = ratio(self.loss[inside] * size, size)
            share = float(size.sum() / self.size.sum())
            span = (int(number) / bins, (int(number) + 1) / bins)
            found.append(Level(*span, part.nats_per_token, part.standard_error, share, part.chunks))
        return found


@dataclass(frozen=True)
class Share:
    """This process is number `index` of `of` that divide the packs; gathered(x): every process's x, by rank."""

    index: int = 0
    of: int = 1
    gathered: Callable[[Any], list[Any]] = lambda value: [value]


ALONE = Share()


def bound(
    row_model: RowModel,
    objective: Objective,
    packs: Iterable[Sequence[Document]],
    *,
    seed: int = 0,
    draws: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> Bound:
    """Estimate the bound of `packs`, in this process: see `measure`."""
    return measure(row_model, objective, packs, seed=seed, draws=draws, report=report).bound


def measure(
    row_model: RowModel,
    objective: Objective,
    packs: Iterable[Sequence[Document]],
    *,
    seed: int = 0,
    draws: int = 1,
    report: Callable[[int, int], None] | None = None,
    share: Share = ALONE,
) -> Measured:
    """Estimate the bound of `packs` (each runs through the model at once) from `draws` noise draws per chunk.

    The objective is bound to the model's mask token. report: called with (packs done, packs) after each round of the
    processes, equally often by all. Raises UserError when nothing is scored, NotImplementedError for an objective
    without a bound.
    """
    packs = list(packs)
    single = objective.evaluation()
    noisy = single.model_copy(update={"draws": draws})
    levels = iter(noisy.levels([document for pack in packs for document in pack], seed))
    of_pack = [[next(levels) for _ in pack] for pack in packs]
    mine: dict[int, Scores] = {}
    training = row_model.training
    row_model.eval()
    for first in range(0, len(packs), share.of):
        # Who has no pack left repeats the last one: a model that is divided over processes needs them all.
        number = min(first + share.index, len(packs) - 1)
        mine[number] = scores_of(row_model, (single, noisy), packs[number], seed, of_pack[number])
        if report is not None:
            report(min(first + share.of, len(packs)), len(packs))
    row_model.train(training)
    every = {number: scores for theirs in share.gathered(mine) for number, scores in theirs.items()}
    ordered = [every[number] for number in range(len(packs))]
    nats, tokens, level, loss, size = (np.concatenate([one[i] for one in ordered] or [EMPTY]) for i in range(5))
    return Measured(ratio(nats, tokens), level, loss, size)


class Scores(NamedTuple):
    """Of one pack: nats and tokens of each document with something to score; level, loss and size of each block."""

    nats: np.ndarray
    tokens: np.ndarray
    level: np.ndarray
    loss: np.ndarray
    size: np.ndarray


EMPTY = np.empty(0)


def scores_of(
    row_model: RowModel,
    objectives: tuple[Objective, Objective],
    pack: Sequence[Document],
    seed: int,
    level: list[Any],
    guidance: float = 0.0,
) -> Scores:
    """What a pack adds to the bound. objectives: that of evaluation with one noise draw, and with all of them.

    guidance: see `unmask.evaluation.guided`.
    """
    single, noisy = objectives
    rows = noisy.rows(pack, seed, level).pruned()
    with torch.no_grad():
        if guidance:
            bare = noisy.rows([without_prompt(one, noisy) for one in pack], seed, level).pruned()
            found = guided(row_model, noisy, rows, bare, guidance)
        else:
            found = row_model(row_model.collate(rows), noisy, per_row=True)
    nll = found.double().cpu().numpy()
    if len(rows.labelled) == 0:  # only now: a model that is divided over processes needs them all
        return Scores(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)
    label = rows.labelled
    total = np.bincount(rows.document[label], weights=rows.weight[label] * nll, minlength=len(pack))
    nats, tokens = [], []
    for document, own, its_level in zip(pack, total, level, strict=True):
        weight = noisy.rows([document], seed, [its_level]).count
        if weight > 0:
            count = single.rows([document], seed).count
            nats.append(float(own) / weight * count)
            tokens.append(count)
    return Scores(np.array(nats), np.array(tokens), *scored_blocks(rows, nll))


def ratio(nats: np.ndarray, tokens: np.ndarray) -> Bound:
    """The ratio estimator: r = sum(nats) / sum(tokens); its variance is that of the residuals nats - r * tokens."""
    n, total = len(nats), float(tokens.sum())
    if total == 0:
        raise UserError("evaluation: the data has no token to score")
    ratio = float(nats.sum()) / total
    error = math.sqrt(n / (n - 1) * float(((nats - ratio * tokens) ** 2).sum())) / total if n > 1 else math.nan
    return Bound(ratio, error, round(total), n)


def text_bytes(documents: Iterable[Document], tokenizer: Any, objective: Objective) -> int:
    """UTF-8 bytes of the text of the tokens that the objective's evaluation scores, special tokens left out."""
    scored = (document.token[objective.scored_tokens(document)].tolist() for document in documents)
    return sum(len(tokenizer.decode(token, skip_special_tokens=True).encode()) for token in scored)
