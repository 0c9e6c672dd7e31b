import pytest

from tests.objectives.support import bound, document
from unmask.objectives.denominators import Counts, share


@pytest.mark.parametrize(
    ("denominator", "expected"),
    [
        ("tokens", (1.0, 24.0)),
        ("supervised", (1.0, 15.0)),
        ("scored", (1.0, 12.0)),
        ("masked", (1.0, 7.0)),
        ("document", (0.2, 3.0)),
        ("batch", (1.0, 3.0)),
    ],
)
def test_scale_and_count_of_a_document(denominator, expected):
    assert share(denominator, Counts(tokens=8, supervised=5, scored=4, masked=7), draws=3) == pytest.approx(expected)
    empty = share(denominator, Counts(8, 0, 0, 0), draws=3)
    assert empty[1] == (24.0 if denominator == "tokens" else 0.0)


def test_counts_add_over_packs_ranks_and_accumulation():
    # Packs with 5 and 8 supervised tokens: each loss is divided by 13, however they are dealt out. Averaging gradients
    # over 2 ranks and 2 accumulation steps instead, as DDP does, would need the denominator 13 / 4.
    objective = bound("block_diffusion", block_size=4)
    documents = [document(9, 1, prompt=4), document(8, 2)]
    levels = objective.levels(documents, 0)
    parts = [objective.rows([one], 0, [level]) for one, level in zip(documents, levels, strict=True)]
    whole = objective.rows(documents, 0, levels)
    assert [part.count for part in parts] == [5, 8]
    assert whole.count == 13
    assert whole.weight.sum() == pytest.approx(sum(part.weight.sum() for part in parts))
    ranks_and_steps = 2 * 2
    averaged = sum(part.weight.sum() for part in parts) / ranks_and_steps / (13 / ranks_and_steps)
    assert averaged == pytest.approx(whole.weight.sum() / whole.count)


@pytest.mark.parametrize("denominator", ["tokens", "supervised", "scored", "document", "batch"])
@pytest.mark.parametrize("name", ["mdlm", "block_diffusion"])
def test_draws_leave_the_loss_a_mean(name, denominator):
    documents = [document(9, 1, prompt=4), document(8, 2)]
    one = bound(name, denominator=denominator).rows(documents, 0)
    four = bound(name, denominator=denominator, draws=4).rows(documents, 0)
    assert four.count == 4 * one.count
