"""Packing loses and doubles no token, fills packs, and agrees with a plain best-fit-decreasing; samplers are pure."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.data import Dataset, Packs, Sampler
from unmask.data.mixing import permutation
from unmask.data.packing import best_fit
from unmask.errors import UserError

PINNED = [5, 4, 2, 7, 0, 3, 1, 6]


def counting(lengths: list[int], supervised: bool = False) -> Dataset:
    """A dataset whose tokens are 0, 1, 2, ... so that every token is its own place."""
    offsets = np.r_[0, np.cumsum(np.array(lengths, np.int64))].astype(np.int64)
    token = np.arange(offsets[-1], dtype=np.uint32)
    return Dataset(token, (token % 3 > 0).astype(np.uint8) if supervised else None, offsets)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    room=st.integers(1, 16),
    bos=st.sampled_from([(), (7,), (7, 8)]),
)
def test_every_token_once(lengths: list[int], room: int, bos: tuple[int, ...]) -> None:
    """But in parts that hold nothing to learn; and the beginning of a document that is cut, where it is the token."""
    dataset = counting(lengths, supervised=True)
    assert dataset._supervised is not None
    starts = np.cumsum([0, *lengths[:-1]])
    for start, length in zip(starts[::2], lengths[::2], strict=True):
        dataset._token[start : start + length][: len(bos)] = bos[:length]
        dataset._supervised[start : start + length][: len(bos)] = 0
    plain, dataset.bos = dataset._token.copy(), bos
    packs = Packs(dataset, room)
    expected = []
    for start, length in zip(starts.tolist(), lengths, strict=True):
        token = plain[start : start + length].tolist()
        flags = dataset._supervised[start : start + length].tolist()
        lead = len(bos) if length > room > len(bos) and len(token) > len(bos) and tuple(token[: len(bos)]) == bos else 0
        chunks = [(token[:room], flags[:room])]
        for first in range(room, length, room - lead):
            last = first + room - lead
            chunks.append(([*bos[:lead], *token[first:last]], [0] * lead + flags[first:last]))
        expected += [chunk for chunk in chunks if any(chunk[1])]
        packs.silent -= len(chunks) - sum(any(chunk[1]) for chunk in chunks)
    found = sorted((document for pack in packs for document in pack), key=lambda document: document.sample)
    assert [(document.token.tolist(), document.supervised.tolist()) for document in found] == expected
    assert packs.silent == 0 and packs.tokens == sum(map(len, found)) and packs.chunks == len(expected)
    assert all(sum(map(len, pack)) <= room for pack in packs)
    assert packs.fill == (packs.tokens / (len(packs) * room) if len(packs) else 0)


def test_prompts_longer_than_a_pack_are_counted() -> None:
    """Parts without a label teach nothing, and what is learnt after such a part lacks the beginning of its prompt."""
    token, flags = np.arange(40, dtype=np.uint32), np.ones(40, np.uint8)
    flags[:21] = 0  # a prompt of 21 tokens, an answer of 4
    flags[25:27] = 0  # a prompt of 2, an answer of 3; then a text of 10
    packs = Packs(Dataset(token, flags, np.array([0, 25, 30, 40])), 8)
    assert (packs.silent, packs.severed, packs.chunks) == (2, 2, 5)
    assert [document.token.tolist() for pack in packs for document in pack if 21 in document.token] == [
        [*range(16, 24)]
    ]
    assert packs.notes("size", "long") == [
        "parts of documents that hold nothing to learn from, left out: 2",
        "parts of documents longer than size=8 that are learnt from without the beginning of their prompt: 2; make "
        "packs larger, or set long=drop",
    ]
    dropped = Packs(Dataset(token, flags, np.array([0, 25, 30, 40])), 8, "drop")
    assert (dropped.silent, dropped.severed, dropped.dropped, dropped.chunks) == (0, 0, 2, 1)


@given(lengths=st.lists(st.integers(1, 12), max_size=60))
def test_best_fit_equals_a_plain_search(lengths: list[int]) -> None:
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(left) if room >= length]
        if fitting:
            left[min(fitting, key=lambda number: left[number])] -= length
        else:
            left.append(12 - length)
    pack = best_fit(np.array(lengths, np.int64), 12)
    used = np.bincount(pack, weights=lengths) if lengths else np.empty(0)
    assert sorted(12 - used) == sorted(left)


def test_chunks_of_a_long_document() -> None:
    packs = Packs(counting([10, 3]), 4)
    chunks = {document.sample: document.token.tolist() for pack in packs for document in pack}
    assert chunks == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9], 3: [10, 11, 12]}
    assert len(packs) == 4
    assert packs.fill == 13 / 16


@pytest.mark.parametrize("median", [100, 600, 3000])
def test_mixed_lengths_fill_packs(median: int) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.0, 5000).astype(int) + 1
    assert Packs(counting(lengths.tolist()), 4096).fill >= 0.98


def test_batches_are_a_function_of_seed_and_step() -> None:
    packs = Packs(counting([5, 9, 2, 7, 1, 8, 3] * 6), 10)

    def samples(sampler: Sampler, step: int) -> list[list[int]]:
        return [[document.sample for document in pack] for pack in sampler.batch(step)]

    one, other = Sampler(packs, 4, seed=3), Sampler(packs, 4, seed=3)
    forward = [samples(one, step) for step in range(12)]
    backward = [samples(other, step) for step in reversed(range(12))][::-1]
    assert forward == backward
    assert forward != [samples(Sampler(packs, 4, seed=4), step) for step in range(12)]
    # The batch size changes where batches end and nothing else.
    assert sum(forward, []) == sum([samples(Sampler(packs, 6, seed=3), step) for step in range(8)], [])


@pytest.mark.parametrize("batch_size", [1, 3, 5, 40])
def test_an_epoch_sees_every_chunk_once_and_the_next_gives_new_samples(batch_size: int) -> None:
    packs = Packs(counting([5, 9, 2, 7, 1, 8, 3]), 10)
    sampler = Sampler(packs, batch_size, seed=0)
    passes = 3
    stream = [pack for step in range(sampler.steps(passes)) for pack in sampler.batch(step)]
    stream = stream[: passes * len(packs)]
    orders = []
    for epoch in range(passes):
        chosen = [document for pack in stream[epoch * len(packs) : (epoch + 1) * len(packs)] for document in pack]
        samples = [document.sample for document in chosen]
        assert sorted(samples) == list(range(epoch * packs.chunks, (epoch + 1) * packs.chunks))
        assert sorted(np.concatenate([document.token for document in chosen])) == list(range(35))
        orders.append([sample % packs.chunks for sample in samples])
    assert orders[0] != orders[1]
    assert sampler.steps(1) == -(-len(packs) // batch_size)


def test_epochs_are_what_people_write() -> None:
    """The least number of steps whose packs cover epochs x packs, in whole numbers; 50 times 0.14 is 7.000...01."""
    for count in (1, 7, 50, 99):
        packs = Packs(counting([10] * count), 10)
        for batch_size in (1, 3):
            sampler = Sampler(packs, batch_size, seed=0)
            for hundredths in range(1, 250):
                asked = hundredths * count  # in hundredths of a pack
                expected = next(step for step in itertools.count(1) if step * batch_size * 100 >= asked)
                assert sampler.steps(hundredths / 100) == expected
    assert Sampler(Packs(counting([10] * 7), 10), 3, seed=0).passes(7) == 3


def test_the_order_of_an_epoch_is_pinned() -> None:
    """Runs resume under other versions of numpy, too: these come from Philox words and a stable sort."""
    assert permutation(8, 0, 0).tolist() == PINNED
    assert sorted(permutation(1000, 5, 7)) == list(range(1000))
    assert permutation(8, 0, 1).tolist() != PINNED != permutation(8, 1, 0).tolist()


def test_nothing_to_pack() -> None:
    empty = Packs(counting([]), 8)
    assert len(empty) == 0 and list(empty) == []
    with pytest.raises(UserError, match="holds no document"):
        Sampler(empty, 1, 0)
    with pytest.raises(IndexError):
        Packs(counting([3]), 8)[1]


def test_long_documents_are_cut_refused_or_dropped() -> None:
    dataset = counting([3, 11, 10, 25, 2])
    cut, dropped = Packs(dataset, 10), Packs(dataset, 10, "drop")
    assert (cut.tokens, cut.dropped, cut.chunks) == (51, 0, 8)
    assert (dropped.tokens, dropped.dropped, dropped.chunks) == (15, 2, 3)
    kept = sorted(document.token.tolist() for pack in dropped for document in pack)
    assert kept == [list(range(3)), list(range(14, 24)), [49, 50]]
    assert dropped.fill == 15 / 20
    with pytest.raises(UserError, match="here: document 1 has 11 tokens, and 1 more are longer than a pack: a pack ho"):
        Packs(dataset, 10, "refuse", "here")
    assert Packs(dataset, 25, "refuse").tokens == 51
