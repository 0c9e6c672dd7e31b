"""What a loss is divided by. Published trainers differ here more than anywhere else, so it is a named option.

    tokens      every token, prompts too                            LLaDA pre-training, MDLM (there all are supervised)
    supervised  every supervised token, masked or not               BD3LM, SDAR, dllm (`token`)
    scored      the supervised tokens that a row can predict        likelihood evaluation
    masked      the labelled rows of this step                      Dream, DiffuLLaMA, LLaDA2
    document    a document's supervised tokens, then the mean       LLaDA SFT, dllm (`sequence`)
                over documents
    batch       the documents that hold a supervised token          dllm (`batch`)

`scored` leaves out position 0 where it is kept clean or where no row precedes it. Every count but `masked`, which
grows by itself, is multiplied by the number of draws, so that the loss stays a mean.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Denominator = Literal["tokens", "supervised", "scored", "masked", "document", "batch"]


class Counts(NamedTuple):
    """Tokens of one document: all, supervised, supervised and predictable, and its labelled rows over all draws."""

    tokens: int
    supervised: int
    scored: int
    masked: int


def share(denominator: Denominator, counts: Counts, draws: int) -> tuple[float, float]:
    """(scale, count) of one document: its weights are multiplied by scale, count joins the global denominator."""
    if denominator == "document":
        return 1.0 / max(counts.supervised, 1), float(draws * (counts.supervised > 0))
    if denominator == "batch":
        return 1.0, float(draws * (counts.supervised > 0))
    count: int = getattr(counts, denominator)
    return 1.0, float(count if denominator == "masked" else draws * count)
