import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.support import MASK, bound, document, packs, spelled
from unmask.objectives import Decoding
from unmask.objectives.cart import cart
from unmask.objectives.noise import MASK as MASK_STREAM
from unmask.objectives.noise import generator
from unmask.rows import IGNORE


@given(packs(), st.sampled_from(["mdlm", "llada_sft", "dream", "diffullama"]), st.integers(1, 2))
def test_rows_are_one_noisy_block_per_document_and_draw(documents, variant, draws):
    objective = bound("mdlm", variant=variant, draws=draws)
    levels = objective.levels(documents, seed=2)
    rows = objective.rows(documents, 2, levels)
    expected, labels, answers = {}, 0, 0
    for number, document_ in enumerate(documents):
        n, token, supervised = len(document_), document_.token, document_.supervised
        answers += bool(supervised.any())
        if not supervised.any():
            continue
        for draw in range(draws):
            t = objective.eps + (1 - objective.eps) * levels[number][draw, 0]
            chance = generator(2, document_.sample, draw, MASK_STREAM).random(n)
            masked = [bool(supervised[i] and chance[i] < t) for i in range(n)]
            context = cart(np.array([masked]), 0.8)[0]
            for row in range(n):
                target = row + 1 if objective.shift else row
                scored = target < n and masked[target]
                labels += scored
                weight = context[target] if variant == "dream" and scored else 1 / t
                weight /= supervised.sum() if variant == "llada_sft" else 1
                expected[number, draw, row] = (
                    MASK if masked[row] else int(token[row]),
                    int(token[target]) if scored else IGNORE,
                    pytest.approx(weight if scored else 0.0),
                    frozenset((number, draw, other) for other in range(n)),
                )
    assert spelled(rows) == expected
    tokens = sum(map(len, documents))
    counts = {"mdlm": draws * tokens, "llada_sft": draws * answers, "dream": labels, "diffullama": labels}
    assert rows.count == counts[variant]


@given(packs(), st.booleans(), st.integers(1, 3))
def test_evaluation_scores_every_predictable_supervised_token(documents, shift, draws):
    objective = bound("mdlm", shift=shift, draws=draws).evaluation()
    rows = objective.rows(documents, seed=0)
    predictable = [document_.supervised[shift:].sum() for document_ in documents]
    assert rows.count == draws * sum(predictable)
    # With a loss of 1 per token, whatever the mask, the estimate is exact: sum / count = 1.
    assert rows.weight.sum() == pytest.approx(rows.count)
    per_document = np.bincount(rows.document, rows.weight, minlength=len(documents))
    assert per_document == pytest.approx(draws * np.array(predictable))
    first = (rows.position == 0) & (rows.token == MASK)
    assert not (shift and first.any())


def test_evaluation_counts_are_stratified_over_documents():
    documents = [document(8, sample) for sample in range(16)]
    rows = bound("mdlm").evaluation().rows(documents, seed=5)
    masked = np.bincount(rows.document, rows.label != IGNORE)
    assert sorted(masked) == sorted(list(range(1, 9)) * 2)


def test_inverse_weights_are_unbiased_for_a_loss_that_ignores_the_mask():
    cost = np.random.default_rng(0).random(64) + 0.5
    for variant in ("mdlm", "llada"):
        objective = bound("mdlm", variant=variant, draws=4000, random_length=0.0)
        rows = objective.rows([document(64)], seed=0)
        estimates = (rows.weight * cost[rows.position]).reshape(4000, 64).sum(1) / 64
        error = estimates.std() / 4000**0.5
        assert estimates.mean() == pytest.approx(cost.mean(), abs=5 * error)
        assert error < 0.05


def test_random_length_cuts_a_share_of_documents_to_uniform_lengths():
    documents = [document(50, sample) for sample in range(4000)]
    whole = bound("mdlm", variant="llada", random_length=0.0)
    cut = bound("mdlm", variant="llada", random_length=0.25)
    assert bound("mdlm", variant="llada").random_length == 0.01
    rows = cut.rows(documents, seed=0)
    lengths = np.bincount(rows.document, minlength=4000)
    assert rows.count == lengths.sum()
    shortened = lengths[lengths < 50]
    assert len(shortened) == pytest.approx(0.25 * 4000 * 49 / 50, abs=5 * (4000 * 0.25 * 0.75) ** 0.5)
    assert shortened.mean() == pytest.approx(25, abs=2.5)
    # What is left has the noise it would have had.
    same = whole.rows(documents, seed=0)
    assert rows.token[rows.document == 7].tolist() == same.token[same.document == 7][: lengths[7]].tolist()


def test_variants_match_their_table():
    chosen = {"noise_levels", "eps", "weight", "denominator", "shift", "exclude_mask", "random_length"}
    table = {
        "mdlm": ("antithetic", 1e-3, "inverse", "tokens", False, True, 0.0),
        "llada": ("uniform", 1e-3, "inverse", "tokens", False, False, 0.01),
        "llada_sft": ("uniform", 1e-3, "inverse", "document", False, False, 0.0),
        "dream": ("uniform", 0.0, "cart", "masked", True, False, 0.0),
        "diffullama": ("uniform", 1e-3, "inverse", "masked", True, False, 0.0),
    }
    names = ("noise_levels", "eps", "weight", "denominator", "shift", "exclude_mask", "random_length")
    for variant, values in table.items():
        objective = bound("mdlm", variant=variant)
        assert objective.model_dump(include=chosen) == dict(zip(names, values, strict=True))
        assert objective.excluded_token == (MASK if objective.exclude_mask else None)
        assert objective.decoding == Decoding("full", None, objective.shift)


def test_cosine_and_flat_weights():
    documents = [document(400, 3)]
    cosine = bound("mdlm", schedule="cosine")
    t = 1e-3 + (1 - 1e-3) * cosine.levels(documents, 0)[0][0, 0]
    rows = cosine.rows(documents, 0)
    assert rows.weight[rows.labelled] == pytest.approx(np.pi / 2 / np.tan(np.pi / 2 * t))
    assert len(rows.labelled) / 400 == pytest.approx(np.sin(np.pi / 2 * t), abs=0.12)
    flat = bound("mdlm", weight="flat").rows(documents, 0)
    assert (flat.weight[flat.labelled] == 1).all()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_weight_offset_is_added_to_the_inverse_weight_s_denominator(schedule):
    """-alpha'(t) / (1 - alpha(t) + offset); the bound of the evaluation has none."""
    documents = [document(400, 3)]
    objective = bound("mdlm", schedule=schedule, weight_offset=0.25)
    t = 1e-3 + (1 - 1e-3) * objective.levels(documents, 0)[0][0, 0]
    slope, masked = (1.0, t) if schedule == "linear" else (np.pi / 2 * np.cos(np.pi / 2 * t), np.sin(np.pi / 2 * t))
    rows = objective.rows(documents, 0)
    assert rows.weight[rows.labelled] == pytest.approx(slope / (masked + 0.25), rel=1e-12)
    plain, offset = (each.evaluation().rows(documents, 0) for each in (bound("mdlm", schedule=schedule), objective))
    assert (plain.weight == offset.weight).all()
