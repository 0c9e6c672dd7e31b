"""Learning-rate schedules: linear warm-up, then a half cosine or a constant.

    multiplier(s) = (s + 1) / w                                              s < w
                  = floor + (1 - floor) * (1 + cos(pi * (s + 1 - w) / (S - w))) / 2   s >= w

for the updates s = 0 .. S-1: update w - 1 runs at the peak, the last one at the floor.
"""

from __future__ import annotations

import math

from unmask.config import ScheduleConfig


def multiplier(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 0) of `steps`, as a fraction of the peak."""
    warmup = round(schedule.warmup if schedule.warmup >= 1 else schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    progress = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * progress))
