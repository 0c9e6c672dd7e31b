import pytest

from tests.objectives.support import bound, document
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.rows import pairs


def test_llada2_warm_up_stable_decay():
    phases = [
        {"until": 10, "size": 1},
        {"until": 0.2, "size": 4},
        {"until": 0.5, "size": 64},
        {"until": 0.8, "size": "full"},
        {"size": 32},
    ]
    objective = bound("block_diffusion", block_schedule=phases)
    sizes = [objective.at(step, 100).block_size for step in (0, 9, 10, 19, 20, 49, 50, 79, 80, 99, 500)]
    assert sizes == [1, 1, 4, 4, 64, 64, "full", "full", 32, 32, 32]
    assert objective.decoding == Decoding("block", 32, False)
    assert objective.at(60, 100).decoding == Decoding("full", None, False)
    assert objective.evaluation().size == 32
    assert objective.at(60, 100).evaluation().size == "full"
    assert objective.at(0, 100).mask_token_id == objective.mask_token_id


def test_full_blocks_are_whole_documents_without_clean_rows():
    documents = [document(6, 1), document(5, 2, prompt=2), document(3, 3, prompt=3)]
    rows = bound("block_diffusion", block_size="full").rows(documents, seed=0)
    assert rows.clean == 0
    assert rows.blocks()[1].tolist() == [6, 5]
    assert pairs(rows).sum() == 36 + 25
    assert rows.count == 6 + 3


def test_without_a_schedule_the_objective_stays():
    objective = bound("block_diffusion", block_size=8)
    assert objective.at(3, 10) is objective


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ([], "empty"),
        ([{"size": 4}, {"size": 8}], "block_schedule[0] needs `until`"),
        ([{"until": 0.5, "size": 4}, {"until": 0.5, "size": 8}, {"size": 8}], "must increase"),
        ([{"until": 0.5, "size": 0}], "block_schedule.0.size: 0 is not a block size"),
        ([{"until": 0.5, "size": "whole"}], "'whole' is not a block size"),
        ([{"untill": 0.5, "size": 4}], "did you mean 'until'"),
    ],
)
def test_mistakes_are_told_in_one_sentence(phases, sentence):
    with pytest.raises(UserError, match="objective block_diffusion: ") as error:
        bound("block_diffusion", block_schedule=phases)
    assert sentence in str(error.value)
