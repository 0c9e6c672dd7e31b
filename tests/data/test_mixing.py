"""Shares that hold at every place, each pack in its turn, and nothing that depends on more than (seed, step)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_packing import counting
from unmask.data import Mixture, Packs, Sampler, Source
from unmask.data.mixing import permutation
from unmask.errors import UserError


def mixture(*sources: tuple[list[int], float | None], room: int = 10) -> Mixture:
    return Mixture(
        [
            Source(f"s{number}", Packs(counting(lengths), room), weight)
            for number, (lengths, weight) in enumerate(sources)
        ]
    )


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), start=st.integers(0, 10**9))
def test_shares_hold_at_every_place(weights: list[float], start: int) -> None:
    mixed = mixture(*[([10] * (number + 2), weight) for number, weight in enumerate(weights)])
    before = mixed.counts(start)
    for place in range(start, start + 40):
        number, earlier = mixed.source(place)
        assert earlier == before[number]
        before[number] += 1
        assert mixed.counts(place + 1) == before and sum(before) == place + 1
        for count, weight in zip(before, weights, strict=True):
            exact = (place + 1) * Fraction(weight) / sum(map(Fraction, weights))
            assert abs(count - exact) <= len(weights) / 2 + 1e-3


def test_weights_are_of_tokens_not_of_packs() -> None:
    # Packs of the second source are 60 % full: it needs more of them for its half of the tokens.
    mixed = mixture(([10] * 8, 1.0), ([6] * 8, 1.0))
    counts = mixed.counts(8000)
    assert counts[0] * 10 == pytest.approx(counts[1] * 6, rel=1e-3)
    tokens = [0, 0]
    for place in range(800):
        number, pack = mixed.pack(place, seed=0)
        tokens[number] += sum(map(len, pack))
    assert tokens[0] == pytest.approx(tokens[1], abs=20)


def test_without_weights_a_pass_is_every_pack_once() -> None:
    mixed = mixture(([10, 10, 10], None), ([7] * 5, None), ([4, 4, 9], None))
    assert len(mixed) == 3 + 5 + 2
    stream = [mixed.pack(place, seed=1) for place in range(2 * len(mixed))]
    for turn in (stream[: len(mixed)], stream[len(mixed) :]):
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for number, pack in turn:
            seen[number] += [int(token) for document in pack for token in document.token]
        assert [sorted(seen[number]) for number in seen] == [list(range(30)), list(range(35)), list(range(17))]
    assert mixed.passes(2 * len(mixed)) == [2, 2, 2]
    assert mixed.tokens == 30 + 35 + 17 and mixed.documents == 3 + 5 + 3
    assert mixed.fill == pytest.approx((30 + 35 + 17) / (10 * len(mixed)))


def test_no_two_documents_share_their_noise() -> None:
    mixed = mixture(([10] * 3, 3.0), ([5] * 4, 1.0))
    samples = [document.sample for place in range(60) for document in mixed.pack(place, seed=0)[1]]
    assert len(samples) == len(set(samples))
    _, pack = mixed.pack(0, seed=0)
    assert mixed.tokens_of([pack]) == {"source_tokens": [10, 0]}


def test_one_source_is_as_it_was() -> None:
    packs = Packs(counting([5, 9, 2, 7, 1, 8, 3] * 3), 10)
    alone = Mixture([Source("only", packs, 0.3)])
    for place in range(3 * len(packs)):
        epoch, index = divmod(place, len(packs))
        expected = packs.documents(int(permutation(len(packs), 7, epoch)[index]), epoch)
        number, found = alone.pack(place, seed=7)
        assert number == 0 and [one.sample for one in found] == [one.sample for one in expected]
        assert all(np.array_equal(one.token, other.token) for one, other in zip(found, expected, strict=True))
    assert alone.tokens_of([packs[0]]) == {}


def test_batches_are_a_function_of_seed_and_step() -> None:
    def samples(sampler: Sampler, step: int) -> list[list[int]]:
        return [[document.sample for document in pack] for pack in sampler.batch(step)]

    def fresh(seed: int = 3, size: int = 4) -> Sampler:
        return Sampler(mixture(([5, 9, 2, 7, 1, 8, 3] * 6, 2.0), ([10] * 9, 1.0)), size, seed)

    forward = [samples(one, step) for one in [fresh()] for step in range(30)]
    assert forward == [samples(fresh(), step) for step in reversed(range(30))][::-1]
    assert forward != [samples(fresh(4), step) for step in range(30)]
    assert sum(forward, []) == sum([samples(fresh(size=6), step) for step in range(20)], [])


def test_mixtures_that_are_refused() -> None:
    with pytest.raises(UserError, match="s1 has no weight, and others have: give every source one, or none"):
        mixture(([1], 1.0), ([1], None))
    with pytest.raises(UserError, match="s1: holds no document"):
        mixture(([1], 1.0), ([], 1.0))
    packs = Packs(counting([20, 30]), 10, "drop")
    with pytest.raises(UserError, match="a: holds no document, only such as are longer than a pack"):
        Mixture([Source("a", packs)])
