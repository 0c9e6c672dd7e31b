"""Three bad steps in a row end a run; an overflow of the loss scale is none."""

import math

import pytest

from unmask.errors import UserError
from unmask.training.guards import FiniteGuard


def test_two_bad_steps_are_forgiven_and_three_name_step_and_samples():
    guard = FiniteGuard()
    for loss, norm in [(math.nan, 1.0), (1.0, math.inf), (1.0, 1.0), (math.inf, 1.0), (math.nan, math.nan)]:
        guard.allows(loss, norm)
        guard.check(1, loss, norm, [7])
    assert guard.streak == 2
    assert not guard.allows(math.nan, 1.0)
    with pytest.raises(UserError, match=r"step 6: the loss is nan, 3 steps in a row \(samples 7, 9\)"):
        guard.check(6, math.nan, 1.0, [7, 9])


def test_an_infinite_gradient_under_loss_scaling_is_skipped_but_not_counted():
    guard = FiniteGuard()
    assert not guard.allows(1.0, math.inf, overflow_is_scale=True)
    assert guard.streak == 0
    assert not guard.allows(math.inf, math.inf, overflow_is_scale=True)
    assert guard.streak == 1
