"""The order of a pass over the data: a permutation that depends on nothing but (seed, epoch)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from unmask.rows.random import EPOCH, generator


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64 and read-only.

    It sorts raw Philox words, which numpy promises to keep from version to version, as it does not for `permutation`.
    """
    order = np.argsort(generator(seed, epoch, purpose=EPOCH).bit_generator.random_raw(n), kind="stable")
    order.flags.writeable = False
    return order
