import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.support import MASK, bound, document, packs, spelled
from unmask.objectives import Decoding
from unmask.objectives.noise import MASK as MASK_STREAM
from unmask.objectives.noise import generator
from unmask.rows import CLEAN, IGNORE, pairs


@given(
    packs(),
    st.integers(1, 5),
    st.integers(1, 2),
    st.sampled_from(["block_causal", "causal"]),
    st.sampled_from(["stratified", "block", "document"]),
    st.booleans(),
)
def test_rows_equal_the_definition_token_by_token(documents, size, draws, clean, noise_levels, keep_first):
    objective = bound(
        "block_diffusion",
        block_size=size,
        draws=draws,
        clean=clean,
        noise_levels=noise_levels,
        keep_first=keep_first,
        clip=(0.2, 0.9),
    )
    levels = objective.levels(documents, seed=9)
    rows = objective.rows(documents, 9, levels)
    expected, supervised = {}, 0
    for number, document_ in enumerate(documents):
        n = len(document_)
        supervised += int(document_.supervised.sum())
        for i in range(n):
            end = i + 1 if clean == "causal" else (i // size + 1) * size
            seen = frozenset((number, CLEAN, j) for j in range(min(end, n)))
            expected[number, CLEAN, i] = (int(document_.token[i]), IGNORE, 0.0, seen)
        maskable = [bool(document_.supervised[i]) and not (keep_first and i == 0) for i in range(n)]
        blocks = [range(s, min(s + size, n)) for s in range(0, n, size)]
        noised = [block for block in blocks if any(maskable[i] for i in block)]
        for draw in range(draws):
            chance = generator(9, document_.sample, draw, MASK_STREAM).random(n)
            for unit, block in enumerate(noised):
                t = 0.2 + 0.7 * levels[number][draw, 0 if noise_levels == "document" else unit]
                seen = {(number, CLEAN, j) for j in range(block.start)} | {(number, draw, j) for j in block}
                for i in block:
                    masked = maskable[i] and chance[i] < t
                    expected[number, draw, i] = (
                        MASK if masked else int(document_.token[i]),
                        int(document_.token[i]) if masked else IGNORE,
                        pytest.approx(1 / t if masked else 0.0),
                        frozenset(seen),
                    )
    assert spelled(rows) == expected
    assert rows.count == draws * supervised


@given(packs(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_evaluation_is_exact_for_a_loss_that_ignores_the_mask(documents, size, draws, keep_first):
    objective = bound("block_diffusion", block_size=size, draws=draws, keep_first=keep_first, clip=(0.45, 0.95))
    rows = objective.evaluation().rows(documents, seed=0)
    scored = [document_.supervised[keep_first:].sum() for document_ in documents]
    assert rows.count == draws * sum(scored)
    per_document = np.bincount(rows.document, rows.weight, minlength=len(documents))
    assert per_document == pytest.approx(draws * np.array(scored))
    starts, sizes = rows.blocks()
    for start, block in zip(starts, sizes, strict=True):
        masked = rows.label[start : start + block] != IGNORE
        assert masked.any()
        assert len(set(rows.weight[start : start + block][masked])) == 1


def test_pairs_of_the_smallest_picture():
    documents = [document(8)]
    rows = bound("block_diffusion", block_size=2).rows(documents, 0)
    assert pairs(rows).sum() == 2**2 * 4 * (4 + 1) == 80
    assert pairs(bound("block_diffusion", block_size=2, clean="causal").rows(documents, 0)).sum() == 76
    sees = {name: seen for name, (_, _, _, seen) in spelled(rows).items()}
    for i in (2, 3):
        assert sees[0, 0, i] == {(0, 0, 2), (0, 0, 3), (0, CLEAN, 0), (0, CLEAN, 1)}
        assert sees[0, CLEAN, i] == {(0, CLEAN, j) for j in range(4)}


def test_bd3lm_levels_are_stratified_over_the_step_and_clipped():
    documents = [document(10, 3), document(7, 1), document(4, 2, prompt=4)]
    objective = bound("block_diffusion", block_size=4, clip=(0.3, 0.8))
    levels = objective.levels(documents, seed=0)
    assert [level.shape for level in levels] == [(1, 3), (1, 2), (1, 0)]
    flat = np.sort(np.concatenate(levels, axis=1)[0])
    assert np.diff(flat) == pytest.approx(1 / 5)
    rows = objective.rows(documents, 0, levels)
    t = 0.3 + 0.5 * levels[0][0, 1]
    block = rows.take(np.flatnonzero((rows.document == 0) & (rows.block >= 0) & (rows.position // 4 == 1)))
    assert len(block.labelled) > 0
    assert block.weight[block.labelled] == pytest.approx(1 / t)


def test_weights_of_the_variants():
    documents = [document(64, sample, prompt=8) for sample in range(3)]

    def weights(**options):
        objective = bound("block_diffusion", block_size=8, **options)
        levels = objective.levels(documents, 0)
        return objective, levels, objective.rows(documents, 0, levels)

    _, _, rows = weights(clip=(0.55, 0.95))
    assert (rows.weight[rows.labelled] == 1).all()  # BD3LM drops 1/t above one half
    assert rows.count == 3 * 56

    _, levels, rows = weights(variant="sdar")
    for number in range(3):
        p = 1e-3 + (1 - 1e-3) * levels[number][0, 0]
        assert rows.weight[(rows.document == number) & (rows.label != IGNORE)] == pytest.approx(1 / p)

    _, levels, rows = weights(variant="a2d")
    p = 1e-3 + (1 - 1e-3) * levels[1][0, 0]
    assert rows.weight[(rows.document == 1) & (rows.label != IGNORE)] == pytest.approx(1 / (p + 1e-6), rel=1e-13)

    objective, levels, rows = weights(variant="llada2")
    assert (rows.weight[rows.labelled] == 1).all()
    assert rows.count == len(rows.labelled)
    fraction = np.bincount(rows.document[rows.labelled]) / 56
    assert fraction == pytest.approx([0.3 + 0.5 * level[0, 0] for level in levels], abs=0.2)

    objective, levels, rows = weights(variant="llada2", weight="inverse", schedule="cosine")
    t = 0.3 + 0.5 * levels[2][0, 0]
    assert rows.weight[(rows.document == 2) & (rows.label != IGNORE)] == pytest.approx(
        np.pi / 2 * np.tan(np.pi / 2 * (1 - t))
    )


def test_sdar_masks_at_least_one_token_of_every_document():
    documents = [document(3, sample, prompt=1) for sample in range(300)]
    rows = bound("block_diffusion", variant="sdar").rows(documents, 0)
    masked = np.bincount(rows.document[rows.labelled], minlength=300)
    assert masked.min() == 1
    without = bound("block_diffusion", variant="sdar", at_least_one=False).rows(documents, 0)
    assert np.bincount(without.document[without.labelled], minlength=300).min() == 0


def test_redraw_keeps_blocks_inside_the_window():
    objective = bound("block_diffusion", block_size=4, clip=(0.3, 0.8), redraw=True)
    rows = objective.rows([document(400, 1)], 0)
    fraction = (rows.label[rows.clean :].reshape(-1, 4) != IGNORE).mean(1)
    assert set(fraction) == {0.5, 0.75}
    plain = objective.model_copy(update={"redraw": False}).rows([document(400, 1)], 0)
    before = (plain.label[plain.clean :].reshape(-1, 4) != IGNORE).mean(1)
    kept = (before >= 0.3) & (before <= 0.8)
    assert 10 < kept.sum() < 100
    assert (rows.label[rows.clean :].reshape(-1, 4)[kept] == plain.label[plain.clean :].reshape(-1, 4)[kept]).all()


def test_likelihood_weights_are_unbiased_for_a_loss_that_ignores_the_mask():
    cost = np.random.default_rng(0).random(20) + 0.5
    for clip in ((1e-3, 1.0), (0.3, 0.8)):
        objective = bound("block_diffusion", block_size=6, draws=4000, clip=clip)
        rows = objective.rows([document(20, prompt=3)], seed=0)
        estimate = (rows.weight * cost[rows.position]).sum() / rows.count
        assert estimate == pytest.approx(cost[3:].mean(), rel=0.03)


def test_decoding():
    assert bound("block_diffusion", block_size=16).decoding == Decoding("block", 16, False)
    assert bound("block_diffusion", clean="causal").decoding == Decoding("block", 32, False, causal=True)
    assert bound("block_diffusion", block_size="full").decoding == Decoding("full", None, False)
    assert bound("block_diffusion").excluded_token == MASK
    assert bound("block_diffusion", variant="sdar").excluded_token is None
