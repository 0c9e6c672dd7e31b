"""What counting tokens gives: the cross-entropies that a model has to beat.

    unigram:  p(b)     = (c(b) + 1) / (N + V)
    bigram:   p(b | a) = (max(c(ab) - d, 0) + d * n(a) * p(b)) / c(a)

c counts in the training split, n(a) is the number of different tokens seen after a, and d = 0.75: absolute
discounting (Ney, Essen and Kneser 1994).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unmask.data import Dataset
from unmask.evaluation.bound import Bound, ratio
from unmask.rows import Document

DISCOUNT = 0.75


def cross_entropies(train: Dataset, held_out: Sequence[Document], vocabulary: int) -> tuple[Bound, Bound]:
    """Of (unigram, bigram), over every supervised token of `held_out` but those at position 0.

    These are the tokens that an autoregressive objective and Fast-dLLM v2's bound score.
    """
    documents = [train.document(index)[0] for index in range(len(train))]
    count = np.bincount(np.concatenate(documents), minlength=vocabulary)
    unigram = (count + 1) / (count.sum() + vocabulary)

    pair, seen = np.unique(
        np.concatenate([token[:-1] * vocabulary + token[1:] for token in documents]), return_counts=True
    )
    after = np.bincount(pair // vocabulary, weights=seen, minlength=vocabulary)
    kinds = np.bincount(pair // vocabulary, minlength=vocabulary)

    def bigram(before: np.ndarray, token: np.ndarray) -> np.ndarray:
        wanted = before * vocabulary + token
        place = np.minimum(np.searchsorted(pair, wanted), len(pair) - 1)
        times = np.where(pair[place] == wanted, seen[place], 0)
        spread = DISCOUNT * kinds[before] * unigram[token]
        smooth = (np.maximum(times - DISCOUNT, 0) + spread) / np.maximum(after[before], 1)
        return np.where(after[before] > 0, smooth, unigram[token])

    nats: list[tuple[float, float]] = []
    for document in held_out:
        flags, before, token = document.supervised[1:], document.token[:-1], document.token[1:]
        likely = unigram[token], bigram(before, token)
        nats.append((-np.log(likely[0][flags]).sum(), -np.log(likely[1][flags]).sum()))
    tokens = np.array([document.supervised[1:].sum() for document in held_out], np.float64)
    first, second = np.array(nats).T
    return ratio(first, tokens), ratio(second, tokens)
