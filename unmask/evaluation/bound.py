"""The likelihood bound: an upper bound, in nats per token, of the negative log-likelihood of held-out documents.

Masked diffusion bounds -log p(x) of a document (or of each block given the blocks before) of L tokens by

    E_k [ L / k * sum over the k masked tokens of -log p(token | the rest) ],   k uniform in 1..L,

the exact-count estimator: k tokens are masked, no more and no less, which scatters less than masking each token with
probability k / L. `objective.evaluation()` draws it, stratified over all documents; for an autoregressive objective
the bound is the likelihood itself. The standard error is over chunks, of the ratio sum(nats) / sum(tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unmask.errors import UserError
from unmask.objectives import Objective
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


def bound(
    row_model: RowModel,
    objective: Objective,
    packs: Iterable[Sequence[Document]],
    *,
    seed: int = 0,
    draws: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> Bound:
    """Estimate the bound of `packs` (each runs through the model at once) from `draws` noise draws per chunk.

    The objective is bound to the model's mask token. report: called with (packs done, packs) after each. Raises
    UserError when nothing is scored, NotImplementedError for an objective without a bound.
    """
    packs = list(packs)
    single = objective.evaluation()
    noisy = single.model_copy(update={"draws": draws})
    levels = noisy.levels([document for pack in packs for document in pack], seed)
    nats: list[float] = []
    tokens: list[float] = []
    training = row_model.training
    row_model.eval()
    for number, pack in enumerate(packs):
        level, levels = levels[: len(pack)], levels[len(pack) :]
        for mean, count in _documents(row_model, (single, noisy), pack, seed, level):
            nats.append(mean * count)
            tokens.append(count)
        if report is not None:
            report(number + 1, len(packs))
    row_model.train(training)
    return ratio(np.array(nats), np.array(tokens))


def _documents(
    row_model: RowModel, objectives: tuple[Objective, Objective], pack: Sequence[Document], seed: int, level: list[Any]
) -> list[tuple[float, float]]:
    """(nats per token, tokens) of every document of a pack that has something to score."""
    single, noisy = objectives
    rows = noisy.rows(pack, seed, level).pruned()
    if len(rows.labelled) == 0:
        return []
    batch = row_model.collate(rows)
    with torch.no_grad():
        nll = row_model(batch, noisy, per_row=True).double().cpu().numpy()
    label = rows.labelled
    total = np.bincount(rows.document[label], weights=rows.weight[label] * nll, minlength=len(pack))
    result = []
    for document, own, its_level in zip(pack, total, level, strict=True):
        weight = noisy.rows([document], seed, [its_level]).count
        if weight > 0:
            result.append((float(own) / weight, single.rows([document], seed).count))
    return result


def ratio(nats: np.ndarray, tokens: np.ndarray) -> Bound:
    """The ratio estimator: r = sum(nats) / sum(tokens); its variance is that of the residuals nats - r * tokens."""
    n, total = len(nats), float(tokens.sum())
    if total == 0:
        raise UserError("evaluation: the data has no token to score")
    ratio = float(nats.sum()) / total
    error = math.sqrt(n / (n - 1) * float(((nats - ratio * tokens) ** 2).sum())) / total if n > 1 else math.nan
    return Bound(ratio, error, round(total), n)


def text_bytes(documents: Iterable[Document], tokenizer: Any) -> int:
    """UTF-8 bytes of the scored tokens' text, special tokens left out."""
    texts = (tokenizer.decode(doc.token[doc.supervised].tolist(), skip_special_tokens=True) for doc in documents)
    return sum(len(text.encode()) for text in texts)
