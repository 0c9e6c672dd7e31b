import numpy as np
import pytest

from unmask.objectives.schedule import likelihood_weight, mask_probability


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_weight_is_minus_alpha_prime_over_one_minus_alpha(schedule):
    t = np.linspace(0.01, 0.99, 50)
    step = 1e-6
    slope = (mask_probability(schedule, t + step) - mask_probability(schedule, t - step)) / (2 * step)  # -alpha'
    assert likelihood_weight(schedule, t) == pytest.approx(slope / mask_probability(schedule, t), rel=1e-6)


def test_closed_forms():
    t = np.array([0.25, 0.5, 1.0])
    assert mask_probability("linear", t) == pytest.approx(t)
    assert likelihood_weight("linear", t) == pytest.approx(1 / t)
    assert likelihood_weight("linear", t, 1e-6) == pytest.approx(1 / (t + 1e-6), rel=1e-14)
    assert mask_probability("cosine", t) == pytest.approx(np.cos(np.pi / 2 * (1 - t)))
    assert likelihood_weight("cosine", t) == pytest.approx(np.pi / 2 * np.tan(np.pi / 2 * (1 - t)), abs=1e-12)
