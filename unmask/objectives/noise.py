"""Counter-based noise: every random number is a pure function of (seed, sample, draw, purpose).

Philox with the sample in its key and the draw in its counter: the same document meets the same noise on any number of
ranks, in any pack, in any micro-batch, before and after a resume.
"""

from __future__ import annotations

import numpy as np

from unmask.rows.random import LENGTH, LEVEL, MASK, ORDER, SIGNAL, TOKEN, generator

__all__ = ["LENGTH", "LEVEL", "MASK", "ORDER", "SIGNAL", "TOKEN", "generator", "uniform"]


def uniform(seed: int, sample: int, draws: int, size: int, purpose: int) -> np.ndarray:
    """U[0, 1) of every draw and position of one document, float64 [draws, size]."""
    return np.stack([generator(seed, sample, draw, purpose).random(size) for draw in range(draws)])
