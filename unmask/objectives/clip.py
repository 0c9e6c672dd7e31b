"""BD3LM's clipped schedule (Arriola et al. 2503.09573, section 5): train where the loss varies least.

The variance of the gradient comes mostly from blocks with almost no or almost only masks. Levels are therefore drawn
from a window (emin, emax) inside (0, 1), chosen at every evaluation as the one whose losses have the lowest variance:

    (emin, emax) = argmin Var[ loss of a block | emin <= t <= emax ],    emax - emin in {0.5, 0.55, ..., 0.9}

The training loss of a clipped window is no longer a likelihood bound; only (1e-3, 1) is. Evaluation never clips.
"""

from __future__ import annotations

import numpy as np

from unmask.rows import Rows

LOWEST = 1e-3
FULL = (LOWEST, 1.0)


def scored_blocks(rows: Rows, nll: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(level, loss, scored tokens) of every scored block of an evaluation's rows, float64 [blocks] each.

    nll float [labelled rows], in the order of rows.labelled. A block that masks k of its n tokens has weight n / k, so
    its level is 1 / weight; its loss is sum(weight * nll) / n, in nats per token.
    """
    labelled = rows.labelled
    noisy = rows.block[labelled] >= 0
    labelled, nll = labelled[noisy], np.asarray(nll, np.float64)[noisy]
    blocks = rows.block[labelled]
    weight = rows.weight[labelled]
    _, first, inverse, masked = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    tokens = masked * weight[first]
    loss = np.bincount(inverse, weight * nll, minlength=len(first)) / np.maximum(tokens, 1.0)
    return 1.0 / weight[first], loss, tokens


def best_clip(level: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """The window of lowest loss variance, from samples (level in [0, 1], loss) of blocks; float [samples] each.

    Windows are 0.5 to 0.9 wide and start at multiples of 0.05. FULL when no window holds two samples.
    """
    level, loss = np.asarray(level, np.float64), np.asarray(loss, np.float64)
    best, lowest = FULL, np.inf
    for width in range(10, 19):
        for start in range(20 - width + 1):
            inside = (level >= start / 20 - 1e-9) & (level <= (start + width) / 20 + 1e-9)
            if inside.sum() < 2:
                continue
            variance = float(loss[inside].var(ddof=1))
            if variance < lowest:
                best, lowest = (max(start / 20, LOWEST), (start + width) / 20), variance
    return best
