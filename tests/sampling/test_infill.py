"""Infilling: the grid, what is visible to the right, and the tokens against brute force."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.reference import EOS, MASK, logits, tiny
from tests.sampling.test_drivers import brute_block, choose, without_mask
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling import Fill, continuation, infill, sample

BLOCK = Decoding("block", 8, False)


def test_a_continuation_holds_what_was_asked_for_and_no_more():
    canvas = continuation([1, 2, 3], 10, MASK)
    assert (len(canvas), canvas.start, canvas.stop) == (13, 3, 13)
    assert canvas.token.tolist() == [1, 2, 3] + [MASK] * 10
    assert canvas.open.tolist() == [False] * 3 + [True] * 10


@pytest.mark.parametrize(
    "before, hole, after, dropped",
    [
        (16, 5, 20, 0),  # the hole starts its block: three suffix tokens are visible
        (21, 5, 20, 5),  # five dropped: the same picture
        (19, 5, 20, 3),  # as it is the hole would end with its block and see nothing
        (6, 5, 20, 3),  # half of the prefix may go, not all: enough to stay in one block
        (24, 12, 20, 0),  # longer than a block: eight, then four with four suffix tokens
        (21, 5, 0, 2),  # no suffix to see: only what keeps the hole in one block
    ],
)
def test_the_grid(before, hole, after, dropped):
    canvas = infill([list(range(before)), list(range(after))], [hole], MASK, block_size=8)
    assert canvas.dropped == dropped
    assert canvas.start == before - dropped and canvas.stop == canvas.start + hole
    assert canvas.token[canvas.stop :].tolist() == list(range(after))
    assert canvas.open.nonzero().flatten().tolist() == list(range(canvas.start, canvas.stop))


@pytest.mark.parametrize("before, hole", [(18, 5), (17, 19)])
@pytest.mark.parametrize("shift", [False, True])
def test_block_infilling_equals_brute_force(before, hole, shift):
    model, twin = tiny(seed=1)
    generator = torch.Generator().manual_seed(hole)
    prefix, suffix = (torch.randint(0, 38, (n,), generator=generator).tolist() for n in (before, 13))
    decoding = Decoding("block", 8, shift)
    result = sample(model, None, prefix, suffix=suffix, decoding=decoding, length=hole, threshold=0.2)
    start = before - result.canvas.dropped
    token = prefix[result.canvas.dropped :] + [MASK] * hole + suffix
    expected, _ = brute_block(twin, token, range(start, start + hole), decoding, 0.2)
    assert result.token == expected[start : start + hole]
    assert result.canvas.token.tolist() == expected


def test_the_suffix_in_the_block_matters_and_what_follows_does_not():
    model, _ = tiny(seed=2)
    prefix = list(range(16))
    first = sample(model, None, prefix, suffix=[5, 6, 7, 8, 9], decoding=BLOCK, length=5)
    same = sample(model, None, prefix, suffix=[5, 6, 7, 30, 31], decoding=BLOCK, length=5)
    other = sample(model, None, prefix, suffix=[25, 26, 27, 8, 9], decoding=BLOCK, length=5)
    assert first.token == same.token != other.token


def test_full_infilling_equals_brute_force():
    model, twin = tiny(seed=3)
    result = sample(model, None, [1, 2, 3], suffix=[4, 5], decoding=Decoding("full", None, False), length=6)
    token = [1, 2, 3] + [MASK] * 6 + [4, 5]
    mask = {"full_attention": torch.ones(11, 11, dtype=torch.bool)}
    while open_ := [p for p in range(11) if token[p] == MASK]:
        rows = without_mask(logits(twin, token, list(range(11)), mask))[open_]
        for i, value in choose(rows, 0.9, 1).items():
            token[open_[i]] = value
    assert result.token == token[3:9]


@pytest.mark.parametrize(
    "lengths, holes, dropped",
    [
        ((16, 3, 4), (2, 2), 5),  # each in a block, three and four given tokens after them there
        ((14, 3, 9), (2, 3), 3),  # with six dropped they would share a block, and see less of what follows
        ((16, 20, 9), (5, 5), 0),  # any other grid cuts one of them in two, or shows less
    ],
)
def test_the_grid_of_several_holes(lengths, holes, dropped):
    canvas = infill([list(range(n)) for n in lengths], holes, MASK, block_size=8)
    assert canvas.dropped == dropped
    first, second = canvas.holes
    assert first == (lengths[0] - dropped, lengths[0] - dropped + holes[0])
    assert second == (first[1] + lengths[1], first[1] + lengths[1] + holes[1])
    assert canvas.wanted(0, len(canvas)).tolist() == [*range(*first), *range(*second)]


@pytest.mark.parametrize("between", [0, 2, 21])
@pytest.mark.parametrize("shift", [False, True])
def test_several_holes_equal_brute_force(between, shift):
    model, twin = tiny(seed=1)
    generator = torch.Generator().manual_seed(between)
    parts = [torch.randint(0, 38, (n,), generator=generator).tolist() for n in (11, between, 6)]
    decoding = Decoding("block", 8, shift)
    result = sample(model, None, Fill(tuple(parts), (5, 9)), decoding=decoding, threshold=0.2)
    canvas = result.canvas
    token = [*parts[0][canvas.dropped :], *[MASK] * 5, *parts[1], *[MASK] * 9, *parts[2]]
    wanted = [p for p, one in enumerate(token) if one == MASK]
    expected, _ = brute_block(twin, token, wanted, decoding, 0.2)
    assert canvas.token.tolist() == expected
    assert [hole.token for hole in result.holes] == [expected[start:stop] for start, stop in canvas.holes]
    assert result.token == [expected[p] for p in wanted]


def test_mistakes_are_told():
    model, _ = tiny()
    with pytest.raises(UserError, match="cannot see a suffix"):
        sample(model, None, [1], suffix=[2], decoding=Decoding("causal", None, True))
    with pytest.raises(UserError, match="prompt is empty"):
        sample(model, None, [], decoding=Decoding("block", 8, True))
    with pytest.raises(UserError, match="unknown sampler 'blok' .did you mean 'block'"):
        sample(model, None, [1], decoding=BLOCK, method="blok")
    with pytest.raises(UserError, match="unknown key 'tempreture' .did you mean 'temperature'"):
        sample(model, None, [1], decoding=BLOCK, tempreture=1)
    with pytest.raises(UserError, match="threshold=2"):
        sample(model, None, [1], decoding=BLOCK, threshold=2)
    with pytest.raises(UserError, match="does not say how it was trained"):
        sample(model, None, [1])
    with pytest.raises(UserError, match="token ids"):
        sample(model, None, "text", decoding=BLOCK)


def test_eos_stays_out_of_a_hole():
    from tests.sampling.test_drivers import Stub

    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight[EOS] += 40 * torch.sign(model.lm_head.weight[EOS])
    for seed in range(6):
        result = sample(model, Stub(), [seed, 2, 3], suffix=[4], decoding=BLOCK, length=12)
        assert len(result.token) == 12 and EOS not in result.token
