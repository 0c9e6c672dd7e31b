import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.objectives.levels import GOLDEN, independent, stratified
from unmask.objectives.noise import LEVEL, ORDER, generator


def test_stratified_levels_are_a_shuffled_shifted_grid():
    units, samples = [3, 5], [4, 9]
    level = np.concatenate(stratified(units, samples, 1, seed=7), axis=1)[0]
    u = generator(7, 4, purpose=LEVEL).random()
    pi = generator(7, 4, purpose=ORDER).permutation(8)
    assert level == pytest.approx((u + pi / 8) % 1)
    assert sorted(np.floor(8 * ((level - u) % 1) + 1e-9)) == list(range(8))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 3), st.randoms())
def test_stratified_levels_know_the_set_of_documents_not_their_order(units, draws, random):
    samples = list(range(50, 50 + len(units)))
    levels = stratified(units, samples, draws, seed=1)
    assert [level.shape for level in levels] == [(draws, count) for count in units]
    order = list(range(len(units)))
    random.shuffle(order)
    again = stratified([units[i] for i in order], [samples[i] for i in order], draws, seed=1)
    for place, i in enumerate(order):
        assert np.array_equal(again[place], levels[i])
    everything = np.sort(np.concatenate(levels, axis=1), axis=1)
    assert (everything >= 0).all() and (everything < 1).all()
    if everything.shape[1] > 1:
        assert np.diff(everything, axis=1) == pytest.approx(1 / everything.shape[1])


def test_more_draws_keep_the_first_ones_and_spread_a_single_unit():
    few, many = stratified([1], [3], 2, 0)[0], stratified([1], [3], 13, 0)[0]
    assert np.array_equal(few, many[:2])
    assert (many[1] - many[0]) % 1 == pytest.approx(GOLDEN)
    gaps = np.diff(np.sort(many[:, 0]))
    assert gaps.max() < 2 / 13  # thirteen independent numbers would leave larger holes


def test_every_unit_is_uniform_on_its_own():
    # The published order gives the first block of a single document the lowest level; the permutation does not.
    first = np.array([stratified([4], [0], 1, seed)[0][0, 0] for seed in range(2000)])
    assert first.mean() == pytest.approx(0.5, abs=5 * 12**-0.5 / 2000**0.5)
    assert np.histogram(first, 4, (0, 1))[0].min() > 400


def test_independent_levels_depend_on_seed_sample_and_draw_alone():
    assert np.array_equal(independent(4, 11, 3, 0)[:2], independent(4, 11, 2, 0))
    assert np.array_equal(independent(4, 11, 1, 0), independent(6, 11, 1, 0)[:, :4])
    assert not np.array_equal(independent(4, 11, 1, 0), independent(4, 12, 1, 0))
    assert not np.array_equal(independent(4, 11, 1, 0), independent(4, 11, 1, 1))
    assert stratified([], [], 1, 0) == []
