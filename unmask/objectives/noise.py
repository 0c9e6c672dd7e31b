"""Counter-based noise: every random number is a pure function of (seed, sample, draw, purpose).

Philox with the sample in its key and the draw in its counter: the same document meets the same noise on any number of
ranks, in any pack, in any micro-batch, before and after a resume.
"""

from __future__ import annotations

import numpy as np

#: What a stream of random numbers is for; streams of different purposes are independent.
LEVEL, MASK, LENGTH, ORDER = range(4)


def generator(seed: int, sample: int, draw: int = 0, purpose: int = LEVEL) -> np.random.Generator:
    """A numpy generator that depends on nothing but its arguments."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample & 0xFFFFFFFFFFFFFFFF], np.uint64)
    counter = np.array([0, 0, draw, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def uniform(seed: int, sample: int, draws: int, size: int, purpose: int) -> np.ndarray:
    """U[0, 1) of every draw and position of one document, float64 [draws, size]."""
    return np.stack([generator(seed, sample, draw, purpose).random(size) for draw in range(draws)])
