"""Which answers an end token is learnt with."""

import json

import numpy as np
from transformers import AutoTokenizer

from tests.sampling.words import word_tokenizer
from unmask.data import end_policy
from unmask.data.ends import answers, special_tokens
from unmask.rows import Document
from unmask.sampling.chat import Conversation

END, EOS, MASK = 37, 38, 39


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


def test_an_end_token_needs_no_role_but_to_be_special(tmp_path):
    """As Qwen's <|im_end|> in a folder that lists it among its added tokens and names it nowhere."""
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("extra_special_tokens", None)
    settings.pop("additional_special_tokens", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    unnamed = AutoTokenizer.from_pretrained(tmp_path)
    assert END not in unnamed.all_special_ids and unnamed.added_tokens_decoder[END].special
    assert end_policy([document(ASKED, (True, [3, 4, END]))], unnamed) == "each answer (<|end|>)"
    assert Conversation(unnamed).end_tokens() == [END]
    assert special_tokens(unnamed) == special_tokens(tokenizer) and MASK not in special_tokens(unnamed)
