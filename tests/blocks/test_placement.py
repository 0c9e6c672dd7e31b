"""What every placement promises: each row owned once, blocks whole, loads by speed, and the balance of known cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.blocks.exchange import Division
from unmask.blocks.placement import held, placements
from unmask.blocks.placement.balance import balance, zigzag
from unmask.objectives import build
from unmask.rows import Document, Rows, Shape, pairs
from unmask.rows.cost import row_costs

#: 4 layers of width 256: linear work and attention are of one order at thousands of rows.
SHAPE = Shape(linear=4 * 12 * 256**2, head=256 * 8192, query_width=256, windows=(None,) * 4)


def block_rows(lengths, block=32, prompt=0.0, seed=0, prune=True, **options) -> Rows:
    objective = build("block_diffusion", {"block_size": block, **options}).model_copy(update={"mask_token_id": 0})
    documents = [Document(np.arange(1, n + 1), np.arange(n) >= round(prompt * n), i) for i, n in enumerate(lengths)]
    rows = objective.rows(documents, seed, objective.levels(documents, seed))
    return rows.pruned() if prune else rows


def loads(rows, owner, ranks, cost=None):
    """(rows, pairs, cost) of every rank."""
    cost = row_costs(rows, SHAPE) if cost is None else cost
    return [np.bincount(owner, weights=value, minlength=ranks) for value in (np.ones(len(rows)), pairs(rows), cost)]


@pytest.mark.parametrize(
    "blocks, ranks, largest",
    [(32, 8, 62), (32, 4, 124), (10, 4, 12), (20, 8, 24), (100, 16, 311)],
)
def test_the_largest_share_of_blocks_that_cost_their_prefix(blocks, ranks, largest):
    """Block i = 0 .. B-1 costs i; means are 62, 124, 11.25, 23.75 and 309.4."""
    cost = np.arange(blocks, dtype=float)
    owner = balance(cost, ranks)
    share = np.bincount(owner, weights=cost, minlength=ranks)
    assert share.sum() == blocks * (blocks - 1) / 2
    assert share.max() <= largest
    if (blocks, ranks) in ((32, 8), (32, 4)):
        assert (share == largest).all()


def test_fewer_blocks_than_ranks():
    assert len(set(balance(np.ones(3), 5).tolist())) == 3
    assert len(balance(np.ones(0), 5)) == 0
    rows = block_rows([64], block=32)
    for name in ("csbp", "block"):
        owner = placements[name].assign(rows, row_costs(rows, SHAPE), 8)
        assert len(np.unique(owner[rows.clean :])) <= 2


def test_clean_zigzag_of_sixteen_on_four_ranks():
    owner = zigzag(16, 4)
    assert np.flatnonzero(owner == 0).tolist() == [0, 1, 14, 15]
    assert np.flatnonzero(owner == 3).tolist() == [6, 7, 8, 9]


def test_a_prompt_of_three_quarters_is_balanced_in_rows_and_in_pairs():
    """P = 4, L = 4096, b = 32: within 5 % of the mean, each."""
    for seed in range(4):
        rows = block_rows([4096], prompt=0.75, seed=seed)
        owner = placements["csbp"].assign(rows, row_costs(rows, SHAPE), 4)
        for share in loads(rows, owner, 4)[:2]:
            assert np.abs(share / share.mean() - 1).max() < 0.05, share


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ragged_packs_are_balanced_within_a_few_per_cent(ranks):
    generator = np.random.default_rng(1)
    for seed in range(3):
        lengths = generator.integers(20, 700, 12).tolist()
        rows = block_rows(lengths, block=16, seed=seed)
        owner = placements["csbp"].assign(rows, row_costs(rows, SHAPE), ranks)
        cost = loads(rows, owner, ranks)[2]
        assert cost.max() / cost.mean() < 1.03, cost


def test_needed_rows_under_a_window_beside_their_blocks():
    """L = 64, b = 4, P = 4, W = 8: 7, 14, 14 and 7 remote clean rows are read, instead of 48 each.

    Ranks own zigzag clean rows, [0,8) + [56,64) to [24,40), and the blocks of the same positions.
    """
    rows = block_rows([64], block=4, clip=[1.0, 1.0], prune=False)
    owner = np.r_[zigzag(64, 4), zigzag(64, 4)]
    division = Division.of(rows, owner, 4, "clean", 8)
    received = [sum(len(division.read(r, o)) for o in range(4) if o != r) for r in range(4)]
    assert received == [7, 14, 14, 7]
    assert [sum(len(division.shared[o]) for o in range(4) if o != r) for r in range(4)] == [48] * 4


def test_clean_rows_are_held_once_under_csbp():
    rows = block_rows([512, 100], block=16)
    owner = placements["csbp"].assign(rows, row_costs(rows, SHAPE), 4)
    parts = [held(rows, owner, "clean", rank)[0] for rank in range(4)]
    assert sum(int((index < rows.clean).sum()) for index in parts) == rows.clean
    # Block parallelism repeats them: nobody can compute a late block without the clean rows before it.
    owner = placements["block"].assign(rows, row_costs(rows, SHAPE), 4)
    parts = [held(rows, owner, "none", rank)[0] for rank in range(4)]
    assert sum(int((index < rows.clean).sum()) for index in parts) > 2 * rows.clean


@st.composite
def packs(draw):
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    options = {
        "block": draw(st.sampled_from([1, 3, 8, 32])),
        "prompt": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "draws": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 5)),
    }
    return block_rows(lengths, **options)


@settings(max_examples=60)
@given(packs(), st.integers(1, 9), st.sampled_from(["csbp", "context", "block", "serial"]), st.booleans())
def test_every_row_is_owned_once_and_blocks_stay_whole(rows, ranks, name, uneven):
    placement = placements[name]
    speeds = np.arange(1, ranks + 1, dtype=float) if uneven else None
    owner = placement.assign(rows, row_costs(rows, SHAPE), ranks, speeds)
    assert owner.shape == (len(rows),) and owner.dtype == np.int64
    assert ((owner >= 0) & (owner < ranks)).all()
    if name != "context":
        starts, sizes = rows.blocks()
        assert (owner[rows.clean :] == np.repeat(owner[starts], sizes)).all()
    parts = [held(rows, owner, placement.SHARED, rank) for rank in range(ranks)]
    labelled = np.concatenate([index[part.labelled] for index, part in parts])
    assert sorted(labelled.tolist()) == rows.labelled.tolist()
    if placement.SHARED != "none":
        assert sorted(np.concatenate([index for index, _ in parts]).tolist()) == list(range(len(rows)))
    again = placement.assign(rows, row_costs(rows, SHAPE), ranks, speeds)
    assert (again == owner).all()


@settings(max_examples=40)
@given(st.lists(st.floats(0.5, 4.0), min_size=2, max_size=6), st.integers(0, 3))
def test_loads_follow_the_speeds(speeds, seed):
    """No rank's time is above the mean by more than one of its largest items takes."""
    rows = block_rows([1024, 300, 57], block=8, seed=seed)
    speed = np.array(speeds)
    cost = row_costs(rows, SHAPE)
    owner = placements["csbp"].assign(rows, cost, len(speed), speed)
    time = np.bincount(owner, weights=cost, minlength=len(speed)) / speed
    starts, _ = rows.blocks()
    largest = np.add.reduceat(cost, starts).max()
    assert time.max() <= 1.02 * cost.sum() / speed.sum() + largest / speed.min()


def test_a_rank_of_twice_the_speed_does_twice_the_work():
    rows = block_rows([2048], block=8)
    for name in ("csbp", "context", "block"):
        cost = row_costs(rows, SHAPE)
        owner = placements[name].assign(rows, cost, 3, np.array([1.0, 2.0, 1.0]))
        noisy = np.arange(len(rows)) >= rows.clean
        share = np.bincount(owner[noisy], weights=cost[noisy], minlength=3)
        if name == "csbp":
            share = np.bincount(owner, weights=cost, minlength=3)
        assert share / share.sum() == pytest.approx([0.25, 0.5, 0.25], abs=0.02), name
