"""Learning rates against values computed by hand."""

import math

import pytest

from unmask.config import ScheduleConfig
from unmask.engine.optim.schedules import multiplier, schedules
from unmask.errors import UserError


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


def test_linear_falls_to_its_floor():
    assert values(6, name="linear", warmup=2, floor=0.2) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert values(4, name="linear", warmup=0, floor=0) == pytest.approx([0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    "shape, share",
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("sqrt", [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
        ("cosine", [0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
    ],
)
def test_wsd_stays_and_then_decays(shape, share):
    # Ten updates: two of warm-up, four at the peak, four (0.4 of all) down to the floor.
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0] + [0.1 + 0.9 * x for x in share]
    for decay in (0.4, 4):
        found = values(10, name="wsd", warmup=2, floor=0.1, decay=decay, decay_shape=shape)
        assert found == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
def test_every_length_is_defined(name, warmup):
    options = {"name": name, "warmup": warmup, "floor": 0.0}
    assert all(0 <= value <= 1 for steps in (1, 2, 3) for value in values(steps, **options))


def test_a_third_party_adds_one_by_name():
    schedules.add("halves", lambda schedule, done, left, steps: 0.5**done)
    assert values(3, name="halves", warmup=0) == [0.5, 0.25, 0.125]
    with pytest.raises(UserError, match="unknown schedule 'cosin' .did you mean 'cosine'"):
        values(3, name="cosin", warmup=0)
