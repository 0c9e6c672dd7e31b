import numpy as np
from hypothesis import given

from tests.objectives.support import bound, packs, spelled
from unmask.objectives import Decoding
from unmask.rows import CLEAN, IGNORE


@given(packs())
def test_rows_are_causal_and_predict_the_next_supervised_token(documents):
    rows = bound("ar").rows(documents, seed=0)
    expected, count = {}, 0
    for number, document in enumerate(documents):
        n = len(document)
        for i in range(n):
            scored = i + 1 < n and bool(document.supervised[i + 1])
            count += scored
            expected[number, CLEAN, i] = (
                int(document.token[i]),
                int(document.token[i + 1]) if scored else IGNORE,
                float(scored),
                frozenset((number, CLEAN, j) for j in range(i + 1)),
            )
    assert spelled(rows) == expected
    assert rows.count == count == len(rows.labelled)


def test_evaluation_is_the_objective_itself():
    objective = bound("ar")
    assert objective.evaluation() is objective
    assert objective.decoding == Decoding("causal", None, True)
    assert len(objective.rows([], 0)) == 0
    assert objective.levels([], 0) == []
    assert np.isfinite(objective.rows([], 0).count)
