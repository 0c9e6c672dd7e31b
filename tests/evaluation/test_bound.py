"""The bound against formulas: ln V, the chain rule, and the expectation over every possible mask."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.objectives.clipped import Clipped
from tests.sampling.reference import MASK, VOCABULARY, block_mask, logits, tiny
from unmask.errors import UserError
from unmask.evaluation import Bound, bound, text_bytes
from unmask.models import RowModel
from unmask.objectives import build
from unmask.rows import Document


def objective(name: str, **options):
    return build(name, options).model_copy(update={"mask_token_id": MASK})


def documents(*lengths: int, prompt: int = 0) -> list[Document]:
    generator = np.random.default_rng(7)
    return [
        Document(generator.integers(0, 38, length), np.arange(length) >= prompt, sample)
        for sample, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    "name, options, scored",
    [
        ("ar", {}, 33 + 9 + 14),
        ("mdlm", {}, 34 + 10 + 15),
        ("mdlm", {"shift": True}, 33 + 9 + 14),
        ("block_diffusion", {"block_size": 4}, 34 + 10 + 15),
        ("fast_dllm_v2", {"block_size": 4}, 33 + 9 + 14),
    ],
)
@pytest.mark.parametrize("draws", [1, 3])
def test_a_uniform_model_has_ln_v(name, options, scored, draws):
    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    chosen = objective(name, **options)
    first, second, third = documents(34, 10, 15)
    result = bound(RowModel(model), chosen, [[first], [second, third]], draws=draws)
    # Where the mask token's logit is excluded there is one token less to choose from.
    vocabulary = VOCABULARY - (chosen.excluded_token is not None)
    assert result.nats_per_token == pytest.approx(math.log(vocabulary), abs=1e-12)
    assert result.standard_error == pytest.approx(0, abs=1e-12)
    assert (result.tokens, result.chunks) == (scored, 3)
    assert result.bits_per_token == pytest.approx(math.log2(vocabulary))
    assert result.bits_per_byte(4 * scored) == pytest.approx(math.log2(vocabulary) / 4)


def nll(twin, tokens, start: int, stop: int, size: int, masked, exclude: bool) -> float:
    """Sum of -log p over the masked positions of the noisy block [start, stop) after clean tokens [0, start)."""
    tokens = list(map(int, tokens))
    noisy = [MASK if p in masked else tokens[p] for p in range(start, stop)]
    position = [*range(start), *range(start, stop)]
    rows = logits(twin, tokens[:start] + noisy, position, {"full_attention": block_mask(start, start, stop, size)})
    if exclude:
        rows[:, MASK] = -torch.inf
    return -sum(float(rows[p].log_softmax(-1)[tokens[p]]) for p in masked)


def expectation(twin, tokens, start: int, stop: int, size: int) -> float:
    """E over k uniform and over all subsets of k positions of L / k * nll."""
    length = stop - start
    return sum(
        length / k * np.mean([nll(twin, tokens, start, stop, size, masked, True) for masked in subsets]) / length
        for k in range(1, length + 1)
        for subsets in [list(itertools.combinations(range(start, stop), k))]
    )


@pytest.mark.parametrize("name, size", [("mdlm", 4), ("block_diffusion", 4), ("block_diffusion", 2)])
def test_unbiased_against_every_mask(name, size):
    model, twin = tiny(seed=5)
    [document] = documents(4)
    chosen = objective(name, **({"block_size": size} if name == "block_diffusion" else {}))
    expected = sum(expectation(twin, document.token, start, start + size, size) for start in range(0, 4, size)) / 4
    # Samples differ, so their noise does: many copies of the document average over it.
    copies = [[Document(document.token, document.supervised, sample) for sample in range(50)]]
    estimates = [bound(RowModel(model), chosen, copies, seed=seed, draws=8).nats_per_token for seed in range(12)]
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - expected) < 4 * error + 1e-12
    assert error < 0.01 * expected


def test_block_size_one_is_the_chain_rule():
    model, twin = tiny(seed=6)
    [document] = documents(9)
    result = bound(RowModel(model), objective("block_diffusion", block_size=1), [[document]])
    chain = sum(nll(twin, document.token, i, i + 1, 1, [i], True) for i in range(9)) / 9
    assert result.nats_per_token == pytest.approx(chain, abs=1e-10)
    assert math.isnan(result.standard_error)


def test_shifted_block_size_one_is_the_autoregressive_likelihood():
    model, _ = tiny(seed=6)
    packs = [documents(9, 20), documents(7, prompt=3)]
    row_model = RowModel(model)
    ours = bound(row_model, objective("fast_dllm_v2", block_size=1), packs)
    theirs = bound(row_model, objective("ar"), packs)
    assert ours.nats_per_token == pytest.approx(theirs.nats_per_token, abs=1e-12)
    assert ours.standard_error == pytest.approx(theirs.standard_error, abs=1e-12)
    assert ours.tokens == theirs.tokens == 8 + 19 + 4


def test_autoregressive_bound_and_its_standard_error():
    model, twin = tiny(seed=8)
    docs = documents(5, 12, 30, 3)
    sums, counts = [], []
    for document in docs:
        n = len(document)
        rows = logits(twin, document.token.tolist(), list(range(n)), {"full_attention": torch.ones(n, n).bool().tril()})
        loss = torch.nn.functional.cross_entropy(rows[:-1], torch.from_numpy(document.token[1:]), reduction="sum")
        sums.append(float(loss))
        counts.append(n - 1)
    result = bound(RowModel(model), objective("ar"), [docs[:3], docs[3:]])
    ratio = sum(sums) / sum(counts)
    residual = [s - ratio * c for s, c in zip(sums, counts, strict=True)]
    error = math.sqrt(4 * sum(r * r for r in residual) / 3) / sum(counts)
    assert result.nats_per_token == pytest.approx(ratio, abs=1e-10)
    assert result.standard_error == pytest.approx(error, abs=1e-10)


def test_packing_changes_nothing():
    model, _ = tiny(seed=9)
    docs = documents(9, 13, 6)
    row_model = RowModel(model)
    together = bound(row_model, objective("block_diffusion", block_size=4), [docs], draws=2)
    apart = bound(row_model, objective("block_diffusion", block_size=4), [[doc] for doc in docs], draws=2)
    assert together.nats_per_token == pytest.approx(apart.nats_per_token, abs=1e-12)


def test_reports_and_leaves_the_mode_alone():
    model, _ = tiny()
    row_model = RowModel(model).train()
    seen = []
    bound(row_model, objective("ar"), [documents(4), documents(5)], report=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
    assert row_model.training


def test_nothing_to_score_is_an_error():
    model, _ = tiny()
    with pytest.raises(UserError, match="no token to score"):
        bound(RowModel(model), objective("ar"), [documents(4, prompt=4)])


@pytest.mark.parametrize(
    "name, options, first",
    [
        ("ar", {}, False),
        ("mdlm", {}, True),
        ("mdlm", {"variant": "dream"}, False),
        ("block_diffusion", {"block_size": 4}, True),
        ("block_diffusion", {"block_size": "full"}, True),
        ("block_diffusion", {"variant": "nemotron", "block_size": 4}, False),
        ("fast_dllm_v2", {"block_size": 4}, False),
        ("i_dlm", {"block_size": 4}, False),
    ],
)
def test_the_bytes_are_those_of_the_tokens_that_evaluation_counts(name, options, first):
    class Letters:
        def decode(self, token, skip_special_tokens):
            return "".join("é" if one else "" for one in token)

    chosen = objective(name, **options)
    prompted = Document(np.array([1, 1, 0, 1]), np.array([False, True, True, True]))
    whole = Document(np.array([1, 1, 0, 1]), np.ones(4, bool), 1)
    for one, scored in ((prompted, 3), (whole, 3 + first)):
        assert chosen.evaluation().rows([one], 0).count == chosen.scored_tokens(one).sum() == scored
    assert prompted.supervised.sum() == 3  # the document's own flags stay as they are
    assert text_bytes([prompted, whole, prompted], Letters(), chosen) == 4 + (6 if first else 4) + 4


def test_asdict():
    assert Bound(1.0, 0.5, 10, 2).asdict()["bits_per_token"] == pytest.approx(1 / math.log(2))


def test_an_objective_with_scores_of_its_own_is_evaluated_by_these():
    """Over the columns of its rows; here they are the terms of its loss."""
    chosen = Clipped(block_size=4, mask_token_id=MASK)
    row_model, documents_ = RowModel(tiny()[0]), documents(34, 10, 15, prompt=3)
    rows = chosen.rows(documents_, 0)
    batch = row_model.collate(rows)
    terms = row_model(batch, chosen)
    result = bound(row_model, chosen, [documents_])
    assert result.nats_per_token == pytest.approx(float(terms.sum.detach()) / rows.count, rel=1e-6)
    likelihood = bound(row_model, objective("block_diffusion", block_size=4), [documents_])
    assert result.nats_per_token != pytest.approx(likelihood.nats_per_token, rel=0.1)
