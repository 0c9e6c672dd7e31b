import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.support import MASK, bound, document, packs, spelled
from unmask.objectives import Decoding
from unmask.objectives.noise import MASK as MASK_STREAM
from unmask.objectives.noise import generator
from unmask.rows import CLEAN, IGNORE, pairs


@given(packs(), st.integers(1, 5), st.integers(1, 2), st.sampled_from(["block", "stratified"]))
def test_rows_equal_the_definition_token_by_token(documents, size, draws, noise_levels):
    objective = bound("fast_dllm_v2", block_size=size, draws=draws, noise_levels=noise_levels)
    levels = objective.levels(documents, seed=4)
    rows = objective.rows(documents, 4, levels)
    expected, targets = {}, 0
    for number, document_ in enumerate(documents):
        n, token, supervised = len(document_), document_.token, document_.supervised
        targets += int(supervised[1:].sum())
        blocks = [range(s, min(s + size, n)) for s in range(0, n, size)]
        responses = [block for block in blocks if supervised[list(block)].any()]
        for i in range(n):
            seen = frozenset((number, CLEAN, j) for j in range(n) if j // size <= i // size)
            expected[number, CLEAN, i] = (int(token[i]), IGNORE, 0.0, seen)
        for draw in range(draws):
            chance = generator(4, document_.sample, draw, MASK_STREAM).random(n)
            first_view = [False] * n
            for unit, block in enumerate(responses):
                p = 1e-3 + (1 - 1e-3) * levels[number][draw, unit]
                for i in block:
                    first_view[i] = bool(supervised[i] and chance[i] < p)
            for complement in (False, True):
                view = draw + draws * complement
                masked = [bool(supervised[i]) and first_view[i] != complement for i in range(n)]
                for block in blocks:
                    if not any(i + 1 < n and supervised[i + 1] for i in block):
                        continue
                    seen = {(number, CLEAN, j) for j in range(block.start)} | {(number, view, j) for j in block}
                    for i in block:
                        scored = i + 1 < n and masked[i + 1]
                        expected[number, view, i] = (
                            MASK if masked[i] else int(token[i]),
                            int(token[i + 1]) if scored else IGNORE,
                            float(scored),
                            frozenset(seen),
                        )
    assert spelled(rows) == expected
    # Every supervised target but position 0 in exactly one view of every draw.
    assert rows.count == len(rows.labelled) == draws * targets
    assert rows.weight.sum() == rows.count


def test_the_smallest_picture():
    rows = bound("fast_dllm_v2", block_size=2).rows([document(8)], 0)
    assert len(rows) == 24
    assert pairs(rows).sum() == 120
    assert rows.count == 7
    assert sorted(rows.position[rows.labelled] + 1) == [1, 2, 3, 4, 5, 6, 7]


def test_a_response_that_starts_with_a_block_is_predicted_from_the_prompts_last_block():
    rows = bound("fast_dllm_v2", block_size=4).rows([document(12, prompt=8)], 0)
    starts, sizes = rows.blocks()
    assert rows.position[starts].tolist() == [4, 4, 8, 8]
    prompt_block = np.isin(rows.position, [4, 5, 6, 7]) & (rows.block >= 0)
    assert (rows.token[prompt_block] != MASK).all()
    assert rows.position[prompt_block & (rows.label != IGNORE)].tolist() == [7]
    assert rows.count == 4


@given(packs(), st.integers(1, 5), st.integers(1, 3))
def test_evaluation_scores_first_tokens_exactly_and_the_rest_of_a_block_by_exact_counts(documents, size, draws):
    rows = bound("fast_dllm_v2", block_size=size, draws=draws).evaluation().rows(documents, seed=0)
    rows.check()
    targets = [document_.supervised[1:].sum() for document_ in documents]
    assert rows.count == draws * sum(targets)
    per_document = np.bincount(rows.document, rows.weight, minlength=len(documents))
    assert per_document == pytest.approx(draws * np.array(targets))
    for row in range(len(rows)):
        first = (rows.position[row] + 1) % size == 0
        if rows.block[row] == CLEAN:
            assert rows.label[row] == IGNORE or (first and rows.weight[row] == draws)
        else:
            assert not (first and rows.label[row] != IGNORE)
            assert not (rows.position[row] % size == 0 and rows.token[row] == MASK)


def test_blocks_of_one_token_are_evaluated_as_an_autoregressive_model():
    documents = [document(7, 1, prompt=3), document(4, 2)]
    ours = bound("fast_dllm_v2", block_size=1).evaluation().rows(documents, 0)
    assert spelled(ours) == spelled(bound("ar").rows(documents, 0))
    assert ours.count == bound("ar").rows(documents, 0).count


def test_decoding():
    assert bound("fast_dllm_v2", block_size=8).decoding == Decoding("block", 8, True)
