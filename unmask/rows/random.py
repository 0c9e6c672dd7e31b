"""Counter-based randomness: every random number is a pure function of (seed, sample, draw, purpose).

Philox with the sample in its key and the draw in its counter (Salmon et al., Parallel random numbers: as easy as 1, 2,
3, SC 2011): no state travels anywhere, so nothing depends on ranks, packs, micro-batches or resumes.
"""

from __future__ import annotations

import numpy as np

#: What a stream of random numbers is for; streams of different purposes are independent.
LEVEL, MASK, LENGTH, ORDER, EPOCH, EMBEDDING, TOKEN, SIGNAL = range(8)


def generator(seed: int, sample: int, draw: int = 0, purpose: int = LEVEL) -> np.random.Generator:
    """A numpy generator that depends on nothing but its arguments."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample & 0xFFFFFFFFFFFFFFFF], np.uint64)
    counter = np.array([0, 0, draw, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
