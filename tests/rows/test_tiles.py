"""Tiles: every attended pair lies in one rectangle, batches are what a kernel may take, and few cells are lost."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows.brute import WINDOWS, Described, built, packs, pair_mask
from unmask.attention import Plan
from unmask.objectives import build
from unmask.rows import Document, Rows, pairs
from unmask.rows.tiles import LEVELS, Batch, own_blocks, tiles

SMALL_LEVELS = st.sampled_from([LEVELS, ((8, 4),), ((4, 2), (16, 1)), ((3,),), ((1,),)])


def times_covered(batches: Iterable[Batch], queries: int, keys: int) -> np.ndarray:
    """How many rectangles hold each pair, int64 [queries, keys]; asserts what every batch promises."""
    count = np.zeros((queries, keys), np.int64)
    for batch in batches:
        assert len(batch.q) == len(batch.k) > 0 and batch.rows > 0 and batch.keys > 0
        assert (np.diff(batch.q) >= batch.rows).all(), "a batch touches a row twice, or is out of order"
        assert batch.q[0] >= 0 and batch.q[-1] + batch.rows <= queries
        assert batch.k.min() >= 0 and batch.k.max() + batch.keys <= keys
        assert batch.cells == len(batch.q) * batch.rows * batch.keys
        if batch.mask is not None:
            assert batch.mask.shape == (batch.rows, batch.keys) and not batch.mask.all()
        for q, k in zip(batch.q, batch.k, strict=True):
            count[q : q + batch.rows, k : k + batch.keys] += 1 if batch.mask is None else batch.mask
    return count


@given(packs(), WINDOWS, SMALL_LEVELS)
def test_tiles_and_own_blocks_hold_every_pair_once(
    pack: list[Described], window: int | None, levels: tuple[tuple[int, ...], ...]
) -> None:
    rows = built(pack)
    batches = tiles(*rows.interval(window), levels=levels) + own_blocks(rows)
    assert np.array_equal(times_covered(batches, len(rows), len(rows)), pair_mask(rows, window))


@given(packs(), WINDOWS, SMALL_LEVELS, st.integers(0, 99))
def test_a_selection_of_queries_keeps_its_pairs(
    pack: list[Described], window: int | None, levels: tuple[tuple[int, ...], ...], seed: int
) -> None:
    rows = built(pack)
    query = np.flatnonzero(np.random.default_rng(seed).random(len(rows)) < 0.5)
    lo, hi = rows.interval(window)
    batches = tiles(lo[query], hi[query], levels=levels) + own_blocks(rows, query)
    assert np.array_equal(times_covered(batches, len(query), len(rows)), pair_mask(rows, window)[query])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=40), SMALL_LEVELS)
def test_any_intervals_in_any_order(intervals: list[list[int]], levels: tuple[tuple[int, ...], ...]) -> None:
    lo, hi = np.array(intervals, np.int64).reshape(-1, 2).T
    column = np.arange(41)
    expected = (column >= lo[:, None]) & (column < hi[:, None])
    assert np.array_equal(times_covered(tiles(lo, hi, levels=levels), len(lo), 41), expected)


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=3),
    st.sampled_from([1, 4, 32, 50]),
    st.sampled_from([None, 1, 37, 300]),
    st.integers(1, 2),
)
def test_packs_of_thousands_of_rows(lengths: list[int], size: int, window: int | None, draws: int) -> None:
    rows = diffusion(lengths, size, draws)
    lo, hi = rows.interval(window)
    count = times_covered(tiles(lo, hi) + own_blocks(rows), len(rows), len(rows))
    assert np.array_equal(count, rows.dense_mask(window))


def test_own_blocks_of_one_size_are_one_batch() -> None:
    """However many documents and draws: one call for the whole blocks, one for each length of last block."""
    batches = own_blocks(diffusion([70, 33, 70], 32, draws=2))
    assert sorted((batch.rows, len(batch.q), batch.mask is None) for batch in batches) == [
        (1, 2, True),
        (6, 4, True),
        (32, 10, True),
    ]


def test_long_rectangles_need_no_mask() -> None:
    """Of one long document all masked cells lie on the diagonal: one mask, shared by the boundary tiles."""
    rows = diffusion([8192], 32)
    batches = tiles(*rows.interval(None))
    masks = {batch.mask.tobytes() for batch in batches if batch.mask is not None}
    masked = sum(batch.cells for batch in batches if batch.mask is not None)
    assert len(masks) <= 2
    assert masked / sum(batch.cells for batch in batches) < 0.03


@pytest.mark.parametrize(("lengths", "wasted"), [([65536], 0.002), ([600] * 109, 0.06)])
def test_few_computed_cells_are_masked(lengths: list[int], wasted: float) -> None:
    rows = diffusion(lengths, 32)
    cells = sum(batch.cells for batch in tiles(*rows.interval(None)) + own_blocks(rows))
    attended = int(pairs(rows).sum())
    assert 0 <= cells - attended < wasted * attended


def test_the_plan_of_65536_tokens_is_quick() -> None:
    """The goal is 0.1 s (benchmarks/attention.py); the bound leaves room for a slow machine."""
    rows = diffusion([65536], 32)

    def seconds() -> float:
        start = time.process_time()
        assert Plan.from_rows(rows).pattern().batches
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.3


def diffusion(lengths: list[int], size: int, draws: int = 1) -> Rows:
    """Block diffusion over packed documents of these lengths."""
    objective = build("block_diffusion", {"block_size": size, "draws": draws}).model_copy(update={"mask_token_id": 0})
    documents = [Document(np.ones(n, np.int64), np.ones(n, bool), i) for i, n in enumerate(lengths)]
    return objective.rows(documents, 0, objective.levels(documents, 0))
