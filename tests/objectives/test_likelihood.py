"""The objectives under a stock transformers model in fp64 and a dense mask: what they score, what they never see."""

from itertools import permutations

import numpy as np
import pytest
import torch

from tests.objectives.support import MASK, bound, document, logits, row_loss, row_nll, tiny_model
from unmask.rows import Document

VOCABULARY = 13


@pytest.fixture(scope="module")
def model():
    return tiny_model(VOCABULARY)


def small(length, sample=0, prompt=0):
    return document(length, sample, prompt, VOCABULARY)


def next_nll(model, prefix, target):
    """-log p(target | prefix, MASK at the next position) by the stock causal model."""
    scores = model(input_ids=torch.tensor([[*prefix, MASK]]), use_cache=False).logits[0, -1]
    return float(-scores.log_softmax(-1)[target])


def test_blocks_of_one_token_all_masked_give_the_autoregressive_likelihood(model):
    chunk = small(9)
    with torch.no_grad():
        expected = sum(next_nll(model, chunk.token[:i].tolist(), int(chunk.token[i])) for i in range(9)) / 9
        trained = bound("block_diffusion", block_size=1, clip=(1.0, 1.0))
        for objective in (trained, trained.evaluation(), bound("block_diffusion", block_size=1, draws=2).evaluation()):
            rows = objective.rows([chunk], seed=3)
            assert float(row_loss(model, rows)) / rows.count == pytest.approx(expected, abs=1e-12)


def test_ar_equals_the_models_own_loss(model):
    chunk = small(9)
    token = torch.as_tensor(chunk.token)[None]
    with torch.no_grad():
        expected = float(model(input_ids=token, labels=token, use_cache=False).loss)
        rows = bound("ar").rows([chunk], 0)
        assert float(row_loss(model, rows)) / rows.count == pytest.approx(expected, abs=1e-6)
        rows = bound("fast_dllm_v2", block_size=1).evaluation().rows([chunk], 0)
        assert float(row_loss(model, rows)) / rows.count == pytest.approx(expected, abs=1e-6)


def block_scores(model, chunk, block, masked):
    """Logits of one noisy block after its clean prefix, in a sequence of its own with a mask written by hand."""
    start, stop = block
    noisy = [MASK if i in masked else int(chunk.token[i]) for i in range(start, stop)]
    size = stop - start
    mask = np.zeros((stop, stop), bool)
    for i in range(start):
        mask[i, : min((i // size + 1) * size, start)] = True
    mask[start:] = True
    return logits(model, [*chunk.token[:start], *noisy], np.arange(stop), mask)[start:].log_softmax(-1)


def order_bound(model, chunk, block, tokens, shift):
    """Mean over all orders of `tokens` of -log p, one token after another, inside one block."""
    total = 0.0
    orders = list(permutations(tokens))
    for order in orders:
        for place, target in enumerate(order):
            scores = block_scores(model, chunk, block, set(order[place:]))
            total -= float(scores[target - block[0] - shift, int(chunk.token[target])])
    return total / len(orders)


def expectation(model, objective, chunk, grid, seeds=60):
    """E[sum / count] over the exact-count noise: every count alike, every subset that the seeds meet alike."""
    total = 0.0
    for level in grid:
        level_of_all = [np.full_like(one, level) for one in objective.levels([chunk], 0)]
        block_losses: dict[int, dict[tuple, float]] = {}
        for seed in range(seeds):
            rows = objective.rows([chunk], seed, level_of_all)
            nll = row_nll(model, rows).numpy() * rows.weight[rows.labelled]
            for block in np.unique(rows.block[rows.labelled]):
                inside = rows.block[rows.labelled] == block
                pattern = tuple(rows.position[rows.labelled][inside])
                block_losses.setdefault(int(block), {})[pattern] = float(nll[inside].sum())
        total += sum(np.mean(list(patterns.values())) for patterns in block_losses.values()) / rows.count
    return total / len(grid)


def test_the_bound_of_block_diffusion_is_the_mean_over_orders_of_every_block(model):
    chunk = small(6, 1)
    objective = bound("block_diffusion", block_size=3).evaluation()
    with torch.no_grad():
        expected = sum(order_bound(model, chunk, (s, s + 3), range(s, s + 3), shift=0) for s in (0, 3)) / 6
        assert expectation(model, objective, chunk, [0.1, 0.5, 0.9]) == pytest.approx(expected, abs=1e-10)


def test_the_bound_of_a_shifted_whole_document_conditions_on_its_first_token(model):
    chunk = small(4, 2)
    objective = bound("mdlm", variant="dream").evaluation()
    with torch.no_grad():
        expected = order_bound(model, chunk, (0, 4), range(1, 4), shift=1) / 3
        assert expectation(model, objective, chunk, [0.1, 0.5, 0.9]) == pytest.approx(expected, abs=1e-10)


def test_the_bound_of_fast_dllm_v2_is_the_likelihood_of_its_decoder(model):
    chunk = small(8, 3)
    objective = bound("fast_dllm_v2", block_size=4).evaluation()
    with torch.no_grad():
        rests = sum(order_bound(model, chunk, (s, s + 4), range(s + 1, s + 4), shift=1) for s in (0, 4))
        # Token 4 comes from the last row of the committed first block, which has seen tokens 0 to 3.
        first = -float(block_scores(model, chunk, (0, 4), set())[3, int(chunk.token[4])])
        expected = (rests + first) / 7
        assert expectation(model, objective, chunk, [0.1, 0.5, 0.9]) == pytest.approx(expected, abs=1e-10)


OBJECTIVES = [
    ("ar", {}),
    ("mdlm", {}),
    ("mdlm", {"variant": "dream"}),
    ("block_diffusion", {"block_size": 3}),
    ("block_diffusion", {"block_size": 3, "clean": "causal", "draws": 2}),
    ("fast_dllm_v2", {"block_size": 3}),
]


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize(("name", "options"), OBJECTIVES)
def test_no_prediction_sees_its_target(model, name, options, evaluation):
    """Another token at a scored position leaves the logits that predict it as they were."""
    objective = bound(name, **options)
    objective = objective.evaluation() if evaluation else objective
    chunk = small(8, 5, prompt=1)
    with torch.no_grad():
        rows = objective.rows([chunk], 0)
        before = logits(model, rows.token, rows.position, rows.dense_mask())
        for target in range(1, 8):
            token = chunk.token.copy()
            token[target] = token[target] % (VOCABULARY - 1) + 1
            changed = objective.rows([Document(token, chunk.supervised, chunk.sample)], 0)
            predicting = np.flatnonzero(rows.label != changed.label)
            after = logits(model, changed.token, changed.position, changed.dense_mask())
            assert torch.equal(rows_at(before, predicting), rows_at(after, predicting))
    assert len(rows.labelled)


def rows_at(scores, index):
    return scores[torch.as_tensor(index)]


@pytest.mark.parametrize(("name", "options"), OBJECTIVES)
def test_packed_documents_never_meet(model, name, options):
    objective = bound(name, **options)
    documents = [small(7, 1, prompt=2), small(5, 2), small(4, 3, prompt=4)]
    levels = objective.levels(documents, 0)
    with torch.no_grad():
        packed = float(row_loss(model, objective.rows(documents, 0, levels)))
        alone = [objective.rows([one], 0, [level]) for one, level in zip(documents, levels, strict=True)]
        assert packed == pytest.approx(sum(float(row_loss(model, rows)) for rows in alone if len(rows)), rel=1e-10)


@pytest.mark.parametrize(("name", "options"), OBJECTIVES)
def test_pruned_rows_give_the_same_loss_and_gradients(model, name, options):
    rows = bound(name, **options).rows([small(8, 1, prompt=2), small(5, 2), small(4, 3, prompt=4)], 1)
    pruned = rows.pruned()
    if name == "block_diffusion":
        assert len(pruned) < len(rows)
    results = []
    for each in (rows, pruned):
        model.zero_grad()
        loss = row_loss(model, each)
        loss.backward()
        results.append((loss.item(), [parameter.grad.clone() for parameter in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    for full, less in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(full, less, rtol=1e-9, atol=1e-10)
    model.zero_grad()
