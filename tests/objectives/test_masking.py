from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.objectives.masking import at_least_one, bernoulli, exact_count, redrawn


def test_bernoulli_masks_candidates_only():
    number = np.array([[0.1, 0.1, 0.6], [0.9, 0.2, 0.3]])
    mask = bernoulli(number, np.array([[0.5], [0.25]]), np.array([True, False, True]))
    assert mask.tolist() == [[True, False, False], [False, False, False]]


def test_at_least_one_adds_the_smallest_number_to_an_empty_draw():
    number = np.array([[0.1, 0.4, 0.3], [0.1, 0.4, 0.3]])
    candidate = np.array([False, True, True])
    mask = at_least_one(np.array([[False] * 3, [False, True, False]]), number, candidate)
    assert mask.tolist() == [[False, False, True], [False, True, False]]
    assert not at_least_one(np.zeros((1, 3), bool), number[:1], np.zeros(3, bool)).any()


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12), st.integers(0, 99))
def test_exact_count_masks_the_smallest_numbers_of_every_block(tokens, seed):
    random = np.random.default_rng(seed)
    unit = np.sort([token[0] for token in tokens])
    candidate = np.array([token[1] for token in tokens])
    number, level = random.random((2, len(tokens))), random.random((2, 3))
    mask, weight = exact_count(number, level, unit, candidate)
    for draw in range(2):
        for block in range(3):
            members = [i for i in range(len(tokens)) if unit[i] == block and candidate[i]]
            k = 1 + int(level[draw, block] * len(members)) if members else 0
            chosen = sorted(members, key=lambda i: number[draw, i])[:k]
            assert [i for i in members if mask[draw, i]] == sorted(chosen)
            assert weight[draw, members] == pytest.approx([len(members) / max(k, 1)] * len(members))
            assert (mask * weight)[draw, members].sum() == pytest.approx(len(members))
    assert not mask[:, ~candidate].any()


def test_exact_count_takes_every_subset_alike():
    random = np.random.default_rng(0)
    draws, candidate, unit = 6000, np.ones(4, bool), np.zeros(4, np.int64)
    mask, _ = exact_count(random.random((draws, 4)), np.full((draws, 1), 0.3), unit, candidate)  # k = 2
    patterns, counts = np.unique(mask, axis=0, return_counts=True)
    assert len(patterns) == len(list(combinations(range(4), 2)))
    assert np.abs(counts - draws / 6).max() < 5 * (draws * 5 / 36) ** 0.5


def test_redrawn_brings_every_block_that_can_be_into_the_window():
    random = np.random.default_rng(1)
    unit = np.r_[np.repeat(np.arange(8), 4), 8]  # eight blocks of four and a last one of a single token
    candidate = np.ones(33, bool)
    mask = random.random((3, 33)) < 0.5
    calls = 0

    def again():
        nonlocal calls
        calls += 1
        return random.random((3, 33)) < 0.5

    result = redrawn(mask, again, unit, candidate, (0.3, 0.8))
    fraction = result[:, :32].reshape(3, 8, 4).mean(-1)
    assert ((fraction >= 0.3) & (fraction <= 0.8)).all()
    kept = (mask[:, :32].reshape(3, 8, 4).mean(-1) >= 0.3) & (mask[:, :32].reshape(3, 8, 4).mean(-1) <= 0.8)
    assert np.array_equal(result[:, :32].reshape(3, 8, 4)[kept], mask[:, :32].reshape(3, 8, 4)[kept])
    assert calls == 64  # the single token is either masked or not: its tries run out
