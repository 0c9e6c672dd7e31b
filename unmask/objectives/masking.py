"""From noise levels to masks. Arrays are [draws, n] over the n tokens of one document.

    Bernoulli      token i is masked where uniform_i < p
    exact count    k ~ U{1..n} of a block's n candidates are masked, each subset alike, weight n / k

Both are unbiased for the likelihood bound; the exact count has the lower variance (Nie et al. 2502.09992, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def bernoulli(uniform: np.ndarray, probability: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Masks, bool [draws, n]: uniform and probability [draws, n], candidate bool [n]."""
    return (uniform < probability) & candidate


def at_least_one(mask: np.ndarray, uniform: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """`mask`, with the candidate of the smallest number masked in every draw that came out empty."""
    if not candidate.any():
        return mask
    least = np.where(candidate, uniform, np.inf).argmin(axis=1)
    empty = np.flatnonzero(~mask.any(axis=1))
    mask = mask.copy()
    mask[empty, least[empty]] = True
    return mask


def redrawn(
    mask: np.ndarray,
    again: Callable[[], np.ndarray],
    unit: np.ndarray,
    candidate: np.ndarray,
    window: tuple[float, float],
    tries: int = 64,
) -> np.ndarray:
    """`mask`, drawn again for every block whose masked fraction lies outside `window` (BD3LM's `resample`).

    again() gives a fresh mask [draws, n]; unit int64 [n] numbers the blocks (-1: none). A block too short for any
    fraction inside the window keeps its last draw.
    """
    index = np.flatnonzero(candidate)
    group = unit[index]
    size = np.bincount(group)
    for _ in range(tries):
        masked = np.stack([np.bincount(group[draw], minlength=len(size)) for draw in mask[:, index]])
        fraction = masked / np.maximum(size, 1)
        outside = ((fraction < window[0]) | (fraction > window[1])) & (size > 0)
        if not outside.any():
            break
        mask = np.where(outside[:, unit] & candidate, again(), mask)
    return mask


def exact_count(
    uniform: np.ndarray, level: np.ndarray, unit: np.ndarray, candidate: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(mask, weight), [draws, n]: of a block's n candidates the k = 1 + floor(level * n) with the smallest numbers.

    uniform [draws, n]; level [draws, units] in [0, 1); unit int64 [n], the block of every token (-1: none).
    """
    mask = np.zeros(uniform.shape, bool)
    weight = np.zeros(uniform.shape)
    index = np.flatnonzero(candidate)
    if not len(index):
        return mask, weight
    draws, units = level.shape
    size = np.bincount(unit[index], minlength=units)
    count = np.minimum(1 + np.floor(level * size).astype(np.int64), size)
    group = unit[index] + units * np.arange(draws)[:, None]  # [draws, candidates]
    order = np.lexsort((uniform[:, index].ravel(), group.ravel()))
    sizes = np.tile(size, draws)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(order), bool)
    chosen[order] = rank < np.repeat(count.ravel(), sizes)
    mask[:, index] = chosen.reshape(draws, -1)
    weight[:, index] = (size / np.maximum(count, 1))[:, unit[index]]
    return mask, weight
