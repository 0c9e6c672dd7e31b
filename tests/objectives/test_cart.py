import numpy as np
import pytest

from unmask.objectives.cart import cart


@pytest.mark.parametrize("q", [0.8, 0.3, 0.1, 0.001])
def test_weights_are_the_double_sum(q):
    mask = np.random.default_rng(0).random((2, 61)) < 0.6
    expected = np.zeros(mask.shape)
    for draw in range(2):
        for n in range(61):
            for i in range(61):
                if i != n and not mask[draw, i]:
                    expected[draw, n] += 0.5 * q * (1 - q) ** (abs(n - i) - 1)
    assert cart(mask, q) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_full_context_weighs_almost_one_and_none_nothing():
    lone = np.zeros((1, 201), bool)
    lone[0, 100] = True
    assert cart(lone, 0.3)[0, 100] == pytest.approx(1.0, abs=1e-12)
    assert not cart(np.ones((1, 5), bool), 0.3).any()
    assert cart(np.ones((1, 1), bool), 0.3).tolist() == [[0.0]]
