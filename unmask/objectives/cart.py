"""CART, Dream's context-adaptive weights (Ye et al. 2508.15487): a masked token counts by how much context it has.

    w_n = 1/2 * sum over visible i != n of q * (1 - q)^(|n - i| - 1)

q is the geometric's parameter: 0.8 in the paper, 0.1 in Dream's shipped training scripts, 0.3 in others' reproductions.
Prompt tokens are visible context.
"""

from __future__ import annotations

import numpy as np


def cart(mask: np.ndarray, q: float) -> np.ndarray:
    """Weights of all tokens, float64 [draws, n], from bool masks [draws, n]."""
    visible = (~mask).astype(np.float64)
    before = _decayed(visible, 1.0 - q)
    after = _decayed(visible[:, ::-1], 1.0 - q)[:, ::-1]
    weight = np.zeros_like(visible)
    weight[:, 1:] += before[:, :-1]
    weight[:, :-1] += after[:, 1:]
    return 0.5 * q * weight


def _decayed(x: np.ndarray, rate: float) -> np.ndarray:
    """y_n = sum over i <= n of rate^(n-i) x_i, along the last axis, by doubling: log2(n) vectorised passes."""
    y, step = x, 1
    while step < x.shape[-1] and rate**step > 1e-18:
        y = np.concatenate([y[..., :step], y[..., step:] + rate**step * y[..., :-step]], axis=-1)
        step *= 2
    return y
