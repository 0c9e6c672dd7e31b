import numpy as np
import pytest

from unmask.objectives.noise import LENGTH, LEVEL, MASK, ORDER, generator, uniform


def test_streams_differ_in_every_argument():
    streams = [
        (0, 0, 0, LEVEL),
        (1, 0, 0, LEVEL),
        (0, 1, 0, LEVEL),
        (0, 0, 1, LEVEL),
        (0, 0, 0, MASK),
        (0, 0, 0, LENGTH),
        (0, 0, 0, ORDER),
    ]
    numbers = {tuple(generator(*stream).random(4)) for stream in streams}
    assert len(numbers) == len(streams)
    assert generator(5, 2**63 + 1, 3, MASK).random() == generator(5, 2**63 + 1, 3, MASK).random()


def test_uniform_stacks_the_draws():
    number = uniform(3, 8, 2, 1000, MASK)
    assert number.shape == (2, 1000)
    assert np.array_equal(number[1], generator(3, 8, 1, MASK).random(1000))
    assert number.mean() == pytest.approx(0.5, abs=0.05)
    assert abs(np.corrcoef(number)[0, 1]) < 0.15
