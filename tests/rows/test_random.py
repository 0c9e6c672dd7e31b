"""Random numbers are a function of their arguments and of nothing else."""

from __future__ import annotations

import itertools

import numpy as np

from unmask.rows.random import EPOCH, LEVEL, MASK, generator


def test_the_same_arguments_give_the_same_numbers_in_any_order() -> None:
    keys = list(itertools.product((0, 1), (0, 5), (0, 1), (LEVEL, EPOCH)))
    forward = {key: generator(*key).random(4) for key in keys}
    backward = {key: generator(*key).random(4) for key in reversed(keys)}
    assert all(np.array_equal(forward[key], backward[key]) for key in keys)
    assert len({tuple(numbers) for numbers in forward.values()}) == len(keys)


def test_a_long_stream_does_not_run_into_another() -> None:
    streams = [generator(3, 7, draw, purpose) for draw in (0, 1) for purpose in (LEVEL, MASK)]
    numbers = np.concatenate([stream.random(50_000) for stream in streams])
    assert len(np.unique(numbers)) == len(numbers)


def test_philox_words_are_pinned() -> None:
    assert generator(1, 2).bit_generator.random_raw(2).tolist() == [5705853004827290377, 6584680345644299050]


def test_any_integer_is_a_seed() -> None:
    assert generator(-1, 2**70).random() == generator(2**64 - 1, 0).random()
