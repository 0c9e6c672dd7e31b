"""Where noise levels come from, before a schedule turns them into mask probabilities.

Every function gives numbers u in [0, 1), float64 [draws, units] for a document with `units` noise levels (one per
noisy block, or one for the whole document). Each number is uniform on its own. Stratified ones (MDLM's and BD3LM's
antithetic sampling, Sahoo et al. 2406.07524, Arriola et al. 2503.09573) are spread evenly over all N units of a step:

    u_k = (u + pi(k) / N) mod 1,        one u per step, pi a random permutation, k the unit's flat index in the step.

The published strata run in index order, which hands the first block of a batch of one the lowest noise every time:
pi undoes that. Both are keyed by the smallest sample of the step and k counts in sample order, so that the levels
depend on which documents are in the step and not on how these are packed. Draw d adds d times the golden ratio: a
document's draws are then spread too, and the first ones stay as they are when more are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unmask.objectives.noise import LEVEL, ORDER, generator, uniform

GOLDEN = (5**0.5 - 1) / 2


def stratified(units: Sequence[int], samples: Sequence[int], draws: int, seed: int) -> list[np.ndarray]:
    """Levels spread over all units of all documents of a step: one array [draws, units[i]] for each document i."""
    if not len(units):
        return []
    order = np.argsort(np.asarray(samples), kind="stable")
    counts = np.asarray(units, np.int64)[order]
    total, first = int(counts.sum()), int(samples[order[0]])
    shift = generator(seed, first, purpose=LEVEL).random()
    stratum = generator(seed, first, purpose=ORDER).permutation(total) / max(total, 1)
    level = (shift + stratum + GOLDEN * np.arange(draws)[:, None]) % 1.0
    parts = np.split(level, np.cumsum(counts)[:-1], axis=1)
    return [parts[place] for place in np.argsort(order)]


def independent(units: int, sample: int, draws: int, seed: int) -> np.ndarray:
    """Levels of one document, each drawn for itself: [draws, units]."""
    return uniform(seed, sample, draws, units, LEVEL)


def bin_of(level: np.ndarray, bins: int) -> np.ndarray:
    """Which of `bins` bins of equal width over (0, 1] each level lies in, int64; `bins` for nan, which is no level."""
    up = np.ceil(np.round(level * bins, 9)) - 1  # rounded: 0.6 * 5 must not lie above 3
    return np.where(np.isnan(level), bins, np.clip(up, 0, bins - 1)).astype(np.int64)
