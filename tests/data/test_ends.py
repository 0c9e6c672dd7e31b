"""Which answers an end token is learnt with."""

import numpy as np

from tests.sampling.words import word_tokenizer
from unmask.data import end_policy
from unmask.data.ends import answers
from unmask.rows import Document

END, EOS = 37, 38


def document(*stretches: tuple[bool, list[int]]) -> Document:
    token = [one for _, tokens in stretches for one in tokens]
    return Document(np.array(token), np.array([learnt for learnt, tokens in stretches for _ in tokens]))


ASKED = (False, [1, 2, END])


def test_answers_are_the_stretches_after_a_prompt():
    turns = document((False, [1]), (True, [2, 3]), (False, [4]), (True, [5]))
    assert [answer.tolist() for answer in answers(turns)] == [[2, 3], [5]]
    assert answers(document((True, [1, 2]))) == answers(document((False, [1, 2]))) == []


def test_where_an_end_token_is_learnt():
    tokenizer = word_tokenizer()
    ended, open_ = (True, [3, 4, END, 5]), (True, [3, 4, 5])
    both = document(ASKED, ended, ASKED, (True, [6, EOS]))
    assert end_policy([both], tokenizer) == "each answer (<|end|>, <|eos|>)"
    assert end_policy([document(ASKED, open_, ASKED, ended), both, document(ASKED, open_)], tokenizer) == (
        "60.0% of answers (<|end|>, <|eos|>)"
    )
    assert end_policy([document(ASKED, open_, ASKED, ended)] * 2, tokenizer) == "last answer (<|end|>)"
    assert end_policy([document(ASKED, open_)], tokenizer) == "never"
    assert end_policy([document((True, [1, EOS]))], tokenizer) is None
