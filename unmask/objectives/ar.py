"""Autoregressive language modelling: the baseline, and the objective that converted models come from.

    loss = sum over supervised x_{i+1} of -log p(x_{i+1} | x_0 .. x_i) / number of them

Clean rows only, each seeing itself and what is before it; a row carries the next token's label when that token is
supervised. Position 0 has no row before it and is never predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unmask.objectives.base import Decoding, Objective
from unmask.objectives.streams import clean_stream, following, scored
from unmask.rows import Document, Rows, assemble


class AR(Objective):
    """Next-token prediction. It has no noise: `draws` changes nothing. Denominator: the predicted supervised tokens."""

    def unused(self) -> dict[str, str]:
        return {"draws": "an objective with noise"}

    @property
    def decoding(self) -> Decoding:
        return Decoding("causal", None, True)

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        streams, count = [], 0.0
        for document in documents:
            target = document.supervised[None]
            label, weight = scored(document.token, target, np.ones(target.shape), shift=True)
            streams.append((clean_stream(document, 1, label[0], weight[0]), None))
            count += float(following(document.supervised).sum())
        return assemble(streams, count)

    def evaluation(self) -> AR:
        """Itself: the loss is the exact negative log-likelihood of the supervised tokens after position 0."""
        return self
