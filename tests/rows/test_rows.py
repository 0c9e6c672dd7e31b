"""Rows against a brute-force list of pairs: assembly, windows, pruning, padding, exact costs, CASES by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows.brute import WINDOWS, Described, Row, attended, built, columns_follow, packs, pair_mask, seen
from unmask.rows import CLEAN, IGNORE, Document, Rows, Shape, Stream, assemble, flops, padded, pairs

PACKS = packs()


@given(PACKS, WINDOWS)
def test_assembled_rows_see_what_the_description_says(pack: list[Described], window: int | None) -> None:
    rows = built(pack)
    rows.check()
    expected = seen(pack, window)
    assert attended(rows, rows.dense_mask(window)) == expected
    assert attended(rows, pair_mask(rows, window)) == expected
    assert {int(t): int(n) for t, n in zip(rows.token, pairs(rows, window), strict=True)} == {
        token: len(others) for token, others in expected.items()
    }


@given(PACKS)
def test_every_field_follows_its_row_and_the_order_is_clean_then_hi(pack: list[Described]) -> None:
    rows = built(pack, 3.5)
    described = {
        row.token: (number, row)
        for number, document in enumerate(pack)
        for row in [*document.clean, *(row for block in document.blocks for row in block)]
    }
    assert sorted(rows.token.tolist()) == sorted(described)
    for r, token in enumerate(rows.token.tolist()):
        number, row = described[token]
        assert rows.document[r] == number and rows.position[r] == token % 7
        assert rows.label[r] == (token + 1 if row.labelled else IGNORE)
        assert rows.weight[r] == float(row.labelled)
    assert columns_follow(rows) and rows.count == 3.5
    clean = [row.token for document in pack for row in document.clean]
    assert rows.token[: rows.clean].tolist() == clean
    noisy_hi = rows.hi[rows.clean :]
    assert (np.diff(noisy_hi) >= 0).all()
    assert (np.diff(rows.block[rows.clean :]) >= 0).all()
    assert rows.labelled.tolist() == [r for r in range(len(rows)) if rows.label[r] != IGNORE]


@given(PACKS, WINDOWS)
def test_pruned_keeps_everything_the_loss_reads_and_no_whole_block_without_a_label(
    pack: list[Described], window: int | None
) -> None:
    rows = built(pack, 2.0)
    pruned = rows.pruned()
    pruned.check()
    before, after = seen(pack), attended(pruned, pruned.dense_mask())
    needed = set(rows.token[rows.labelled].tolist())
    frontier = set(needed)
    while frontier:
        frontier = {other for token in frontier for other in before[token]} - needed
        needed |= frontier
    assert needed <= set(after)
    windowed, windowed_after = seen(pack, window), attended(pruned, pruned.dense_mask(window))
    assert all(after[token] == before[token] and windowed_after[token] == windowed[token] for token in needed)
    assert pruned.count == rows.count
    for array in ("label", "weight", "position", "document"):
        old = dict(zip(rows.token.tolist(), getattr(rows, array).tolist(), strict=True))
        assert all(old[t] == x for t, x in zip(pruned.token.tolist(), getattr(pruned, array).tolist(), strict=True))
    assert columns_follow(pruned)
    # What goes: blocks without a label, and the tails of clean rows behind the last one needed.
    expected = set()
    for document in pack:
        last = max((i for i, row in enumerate(document.clean) if row.token in needed), default=-1)
        expected |= {row.token for row in document.clean[: last + 1]}
        expected |= {row.token for block in document.blocks if any(r.labelled for r in block) for row in block}
    assert set(after) == expected


@given(PACKS, st.integers(1, 9), WINDOWS)
def test_padding_is_inert(pack: list[Described], multiple: int, window: int | None) -> None:
    rows = built(pack, 2.0)
    wide = padded(rows, multiple)
    wide.check()
    n = len(rows)
    assert len(wide) % multiple == 0 and len(wide) - n < multiple
    mask = wide.dense_mask(window)
    assert np.array_equal(mask[:n, :n], rows.dense_mask(window))
    assert not mask[:n, n:].any()
    assert np.array_equal(mask[n:], np.eye(len(wide), dtype=bool)[n:])
    assert np.array_equal(wide.labelled, rows.labelled) and wide.count == rows.count
    assert (np.diff(wide.hi[wide.clean :]) >= 0).all()
    assert columns_follow(wide.take(np.arange(n)))
    assert not any(column[n:].any() for column in wide.columns.values())


@given(PACKS, st.lists(WINDOWS, min_size=1, max_size=4))
def test_flops_count_every_pair_once(pack: list[Described], windows: list[int | None]) -> None:
    rows = built(pack)
    shape = Shape(linear=1000, head=70, query_width=24, windows=tuple(windows))
    attention = sum(2 * 2 * 3 * 24 * int(pair_mask(rows, window).sum()) for window in windows)
    labelled = sum(label != IGNORE for label in rows.label.tolist())
    assert flops(rows, shape) == 6 * 1000 * len(rows) + 6 * 70 * labelled + attention


@given(PACKS, st.lists(WINDOWS, min_size=1, max_size=3))
def test_flops_of_a_last_layer_with_labelled_queries(pack: list[Described], windows: list[int | None]) -> None:
    rows = built(pack)
    shape = Shape(linear=1000, head=70, query_width=24, windows=tuple(windows), skips=True)
    masks = [pair_mask(rows, window) for window in windows]
    labelled = rows.label != IGNORE
    cells = sum(int(mask.sum()) for mask in masks[:-1]) + int(masks[-1][labelled].sum())
    assert flops(rows, shape) == 6 * 1000 * len(rows) + 6 * 70 * labelled.sum() + 2 * 2 * 3 * 24 * cells


def block_diffusion(length: int, size: int, causal: bool = False) -> Rows:
    """Every block corrupted once, by hand."""
    clean = [
        Row(i, 0, i + 1 if causal else (i // size + 1) * size, False) for i in range(length)
    ]  # length is a multiple of size
    blocks = [[Row(100 + s + k, 0, s, True, size) for k in range(size)] for s in range(0, length, size)]
    return built([Described(clean, blocks)])


def test_block_diffusion_of_eight_tokens_in_blocks_of_two() -> None:
    rows = block_diffusion(8, 2)
    assert pairs(rows).sum() == 2**2 * 4 * (4 + 1) == 80
    assert pairs(block_diffusion(8, 2, causal=True)).sum() == 76
    sees = attended(rows, rows.dense_mask())
    assert sees[102] == sees[103] == {102, 103, 0, 1}
    assert sees[2] == sees[3] == {0, 1, 2, 3}
    assert not any(token >= 100 for clean in range(8) for token in sees[clean])


def test_two_views_share_one_clean_stream() -> None:
    """Fast-dLLM v2, L=8, b=2: 24 rows and 120 pairs, not 32 and 160."""
    pack = Described([Row(i, 0, (i // 2 + 1) * 2, False) for i in range(8)], [])
    for view in (1, 2):
        pack.blocks += [[Row(100 * view + s + k, 0, s, True, 2) for k in (0, 1)] for s in range(0, 8, 2)]
    rows = built([pack])
    assert len(rows) == 24
    assert pairs(rows).sum() == 120


def test_window_of_four_and_a_canvas_at_eight() -> None:
    """A canvas sees clean [5, 8) and itself, the clean row 8 sees [5, 9); in full: [0, 8) and [0, 9)."""
    clean = [Row(i, 0, i + 1, False) for i in range(12)]
    rows = built([Described(clean, [[Row(100 + k, 0, 8, True, 4) for k in range(4)]])])
    canvas = {100, 101, 102, 103}
    narrow, full = attended(rows, rows.dense_mask(4)), attended(rows, rows.dense_mask())
    for token in canvas:
        assert narrow[token] == {5, 6, 7} | canvas
        assert full[token] == set(range(8)) | canvas
    assert narrow[8] == {5, 6, 7, 8}
    assert full[8] == set(range(9))


def test_a_pack_may_hold_nothing() -> None:
    rows = assemble([], 0.0)
    rows.check()
    assert len(rows) == rows.clean == len(rows.labelled) == 0
    assert len(rows.pruned()) == 0
    assert flops(rows, Shape(1, 1, 1, (None,))) == 0.0
    assert len(padded(rows, 4)) == 0


def test_reach_defaults_to_the_whole_block_and_needs_block_ids() -> None:
    index = np.arange(3)
    noisy = Stream(index, index, index * 0, index * 0, index, index * 1.0, block=np.array([0, 0, 4]))
    rows = assemble([(None, noisy)], 1.0)
    assert rows.reach.tolist() == [2, 2, 1]
    assert rows.block.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="a noisy Stream needs block ids"):
        Stream(index, index, index, index, index, index * 1.0).instances()


def test_a_column_that_a_stream_lacks_is_zero_where_no_loss_reads_it() -> None:
    index = np.arange(2)
    silent = Stream(index, index, index * 0, index + 1, index * 0 + IGNORE, index * 0.0)
    noisy = Stream(index, index, index * 0, index * 0, index, index * 1.0, block=index)
    advantage = replace(noisy, columns={"advantage": np.array([[0.5, 2.0], [3.0, 4.0]])})
    rows = assemble([(silent, advantage), (silent, None)], 1.0)
    rows.check()
    assert rows.columns["advantage"].tolist() == [[0.0, 0.0]] * 4 + [[0.5, 2.0], [3.0, 4.0]]
    with pytest.raises(ValueError, match="document 1 has labelled rows without the column 'advantage'"):
        assemble([(silent, advantage), (None, noisy)], 1.0)
    with pytest.raises(ValueError, match=r"every column is \[N\] or \[N, k\]"):
        replace(rows, columns={"advantage": np.zeros(5)}).check()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("block", [CLEAN, 0, CLEAN, 0, 0], "clean rows come first"),
        ("block", [CLEAN, CLEAN, 5, 5, 3], "block ids increase"),
        ("hi", [1, 3, 2, 2, 2], "intervals lie in the clean rows"),
        ("lo", [0, 2, 0, 0, 0], None),
        ("reach", [0, 1, 3, 3, 3], "clean rows reach no block"),
        ("reach", [0, 0, 3, 4, 3], "reach stays in the block"),
        ("label", [0], "every array has N entries"),
    ],
)
def test_check_names_the_broken_rule(field: str, value: list[int], rule: str | None) -> None:
    good = {
        "token": np.arange(5),
        "position": np.arange(5),
        "block": np.array([CLEAN, CLEAN, 0, 0, 0]),
        "lo": np.zeros(5, np.int64),
        "hi": np.array([1, 2, 2, 2, 2]),
        "reach": np.array([0, 0, 3, 3, 3]),
        "label": np.full(5, IGNORE),
        "weight": np.zeros(5),
        "document": np.zeros(5, np.int64),
        "signal": np.zeros(5, np.int64),
    }
    Rows(**good).check()
    rows = Rows(**good | {field: np.array(value)})
    if rule is None:
        rows.check()  # an empty interval is allowed
    else:
        with pytest.raises(ValueError, match=rule):
            rows.check()


def test_a_document_has_the_length_of_its_tokens() -> None:
    assert len(Document(np.arange(5), np.ones(5, bool))) == 5
