"""Learning-rate schedules: linear warm-up, then what `schedule.name` says. For the updates s = 0 .. S-1,

    multiplier(s) = (s + 1) / w                 s < w: update w - 1 runs at the peak
                  = shape(k, n)                 k = s + 1 - w, n = S - w: of the n updates that follow, the k-th

    cosine        floor + (1 - floor) * (1 + cos(pi * k / n)) / 2
    linear        floor + (1 - floor) * (1 - k / n)
    constant      1
    wsd           1 while k <= n - d, then floor + (1 - floor) * f((k - n + d) / d) over the last d updates, with
                  f(x) = 1 - x (linear), 1 - sqrt(x) (sqrt) or (1 + cos(pi * x)) / 2 (cosine)

The last update runs at the floor. Sources: cosine, SGDR, Loshchilov and Hutter 1608.03983; wsd (warm-up, stable,
decay), MiniCPM, Hu et al. 2404.06395; its square root, Hägele et al. 2405.18392.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from unmask.config import ScheduleConfig
from unmask.config.sections import in_steps
from unmask.registry import Registry

#: name -> function(ScheduleConfig, k, n, all steps) -> fraction of the peak, for the updates after the warm-up
schedules = Registry(
    "schedule", {name: f"unmask.engine.optim.schedules:{name}" for name in ("cosine", "linear", "constant", "wsd")}
)


def multiplier(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 0) of `steps`, as a fraction of the peak."""
    warmup = in_steps(schedule.warmup, steps)
    if step < warmup:
        return (step + 1) / warmup
    left = max(1, steps - warmup)
    return schedules[schedule.name](schedule, min(step + 1 - warmup, left), left, steps)


def cosine(schedule: ScheduleConfig, done: int, left: int, steps: int) -> float:
    return _down_to(schedule.floor, SHAPES["cosine"](done / left))


def linear(schedule: ScheduleConfig, done: int, left: int, steps: int) -> float:
    return _down_to(schedule.floor, SHAPES["linear"](done / left))


def constant(schedule: ScheduleConfig, done: int, left: int, steps: int) -> float:
    return 1.0


def wsd(schedule: ScheduleConfig, done: int, left: int, steps: int) -> float:
    decay = min(max(1, in_steps(schedule.decay, steps)), left)
    into = (done - (left - decay)) / decay
    return 1.0 if into <= 0 else _down_to(schedule.floor, SHAPES[schedule.decay_shape](into))


def _down_to(floor: float, share: float) -> float:
    return floor + (1 - floor) * share


#: From 1 at 0 down to 0 at 1.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
}
