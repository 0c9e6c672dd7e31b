"""Learning rates against values computed by hand."""

import math

import pytest

from unmask.config import ScheduleConfig
from unmask.training.schedules import multiplier


def values(steps, **options):
    schedule = ScheduleConfig(**options)
    return [multiplier(schedule, step, steps) for step in range(steps)]


def test_warm_up_reaches_the_peak_and_the_cosine_its_floor():
    # w = 2; progress 1/4, 2/4, 3/4, 1 over the four updates that follow.
    expected = [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * p / 4)) / 2 for p in (1, 2, 3, 4)]
    assert values(6, warmup=2, floor=0.1) == pytest.approx(expected, abs=1e-15)
    assert values(6, warmup=2, floor=0.1)[-1] == pytest.approx(0.1)
    assert values(6, warmup=2, floor=0.1)[3] == pytest.approx(0.55)


def test_a_warm_up_below_one_is_a_fraction_of_the_run():
    assert values(40, warmup=0.1)[:5] == values(40, warmup=4)[:5]
    assert values(40, warmup=0.1)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays_at_the_peak():
    assert values(4, name="constant", warmup=2) == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
def test_every_length_is_defined(warmup):
    assert all(0 <= value <= 1 for steps in (1, 2, 3) for value in values(steps, warmup=warmup, floor=0.0))
