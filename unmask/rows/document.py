"""One document as the objectives take it: token ids, where the loss may be taken, and the name of its noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Document:
    """A tokenised document (or a chunk of one).

    token: int64 [n]; supervised: bool [n], False on prompt tokens (never noised, never scored);
    sample: the integer that names this document's noise. It counts passes over the data
    (epoch * documents + index), so that a document seen twice is noised twice.
    """

    token: np.ndarray
    supervised: np.ndarray
    sample: int = 0

    def __len__(self) -> int:
        return len(self.token)
