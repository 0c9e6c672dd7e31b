"""Noise schedules: alpha(t) is the probability that a token is still visible at noise level t in [0, 1].

    p(t) = 1 - alpha(t)                  probability of a mask
    w(t) = -alpha'(t) / (1 - alpha(t))   weight of a masked token's cross-entropy in the likelihood bound

    linear  alpha = 1 - t                        p = t              w = 1 / t
    cosine  alpha = 1 - cos(pi/2 * (1 - t))      p = sin(pi/2 * t)  w = pi/2 / tan(pi/2 * t)

Sources: Sahoo et al. 2406.07524 (the bound for any alpha), Nie et al. 2502.09992 (linear), Shi et al. 2406.04329
(cosine).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Schedule = Literal["linear", "cosine"]


def mask_probability(schedule: Schedule, t: np.ndarray) -> np.ndarray:
    """p(t), of t's shape."""
    return t if schedule == "linear" else np.sin(np.pi / 2 * t)


def likelihood_weight(schedule: Schedule, t: np.ndarray, offset: float = 0.0) -> np.ndarray:
    """-alpha'(t) / (1 - alpha(t) + offset), of t's shape; dllm's trainers use an offset of 1e-6."""
    rate = np.ones_like(t) if schedule == "linear" else np.pi / 2 * np.cos(np.pi / 2 * t)
    return rate / (mask_probability(schedule, t) + offset)
