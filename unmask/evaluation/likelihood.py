"""Log-likelihoods of single texts given what precedes them, for tasks that compare answers.

Of one (context, continuation) the bound of `unmask.evaluation.bound` is taken with the context never noised: LLaDA's
estimate (2502.09992, appendix B.5), k of the L continuation tokens masked and weight L / k, block by block for block
diffusion and exact for an autoregressive model. The draws of one request are stratified among themselves, and its noise
is a function of (seed, its own tokens): what a request is worth depends on no other request and no batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from unmask.evaluation.bound import scores_of
from unmask.evaluation.guided import check
from unmask.models import RowModel
from unmask.objectives import Objective
from unmask.rows import Document

#: Rows that go through the model together, but for a request that alone has more.
ROWS = 8192

Pair = tuple[Sequence[int], Sequence[int]]


def document(context: Sequence[int], continuation: Sequence[int]) -> Document:
    """A request as a document of which the continuation alone is scored; its noise is named by its tokens."""
    token = np.array([*context, *continuation], dtype=np.int64)
    digest = hashlib.sha256(token.tobytes() + len(context).to_bytes(8, "little")).digest()
    return Document(token, np.arange(len(token)) >= len(context), int.from_bytes(digest[:7], "little"))


def log_likelihoods(
    row_model: RowModel,
    objective: Objective,
    pairs: Sequence[Pair],
    *,
    seed: int = 0,
    draws: int = 1,
    guidance: float = 0.0,
    report: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """log p(continuation | context), in nats, float64 [pairs]: a lower bound in expectation, exact for `ar`.

    pairs: token ids, continuations not empty, contexts neither where row i - 1 predicts token i. The objective is bound
    to the model's mask token. guidance: classifier-free, of whole-sequence models (`unmask.evaluation.guided`); for
    others UserError. report: called with (pairs done, pairs). NotImplementedError for an objective without a bound.
    """
    if guidance:
        check(objective, guidance)
    single = objective.evaluation()
    noisy = single if objective.decoding.kind == "causal" else single.model_copy(update={"draws": draws})
    documents = [document(*pair) for pair in pairs]
    found: list[np.ndarray] = []
    training, done = row_model.training, 0
    row_model.eval()
    for pack in _packs(documents, noisy.draws):
        levels = [noisy.levels([one], seed)[0] for one in pack]
        found.append(-scores_of(row_model, (single, noisy), pack, seed, levels, guidance).nats)
        done += len(pack)
        if report is not None:
            report(done, len(documents))
    row_model.train(training)
    return np.concatenate(found) if found else np.empty(0)


def _packs(documents: Sequence[Document], draws: int) -> Iterator[list[Document]]:
    """Requests in order, as many together as ROWS allow; a noisy view has at most the rows of its document."""
    pack: list[Document] = []
    size = 0
    for one in documents:
        rows = len(one) * (1 + draws)
        if pack and size + rows > ROWS:
            yield pack
            pack, size = [], 0
        pack.append(one)
        size += rows
    if pack:
        yield pack
