"""The trained tokeniser round-trips any text, opens with transformers and is told apart from others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.data.tokenizer import fingerprint, load_tokenizer, refuse_other, train_tokenizer
from unmask.errors import UserError


def test_special_tokens_and_size(tokenizer: Any) -> None:
    assert len(tokenizer) == 1000
    assert [tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id] == [0, 1, 2]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|mask|>", "<|pad|>"]


def test_transformers_opens_the_folder(tokenizer_path: Path, tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(str(tokenizer_path))
    text = "def f(x):\n    return  x ** 2  # é\n"
    assert opened(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert opened.mask_token_id == 1


@given(text=st.text())
def test_every_text_round_trips(tokenizer: Any, text: str) -> None:
    if not any(special in text for special in ("<|endoftext|>", "<|mask|>", "<|pad|>")):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_training_is_deterministic(tmp_path: Path, texts: list[str], tokenizer: Any) -> None:
    again = train_tokenizer(iter(texts), 1000, tmp_path / "again")
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert fingerprint(again) == fingerprint(tokenizer)


def test_a_tokenizer_json_and_its_folder_are_the_same(tokenizer_path: Path, tmp_path: Path, tokenizer: Any) -> None:
    assert fingerprint(load_tokenizer(tokenizer_path / "tokenizer.json")) == fingerprint(tokenizer)
    (tmp_path / "alone.json").write_text((tokenizer_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert fingerprint(load_tokenizer(tmp_path / "alone.json")) == fingerprint(tokenizer)


def test_more_tokens_fit_and_others_do_not(tokenizer_path: Path, tmp_path: Path, tokenizer: Any) -> None:
    grown = load_tokenizer(tokenizer_path)
    grown.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    refuse_other(tokenizer, grown, "here")
    assert fingerprint(grown) != fingerprint(tokenizer)
    other = train_tokenizer(["other words altogether"], 300, tmp_path / "other")
    with pytest.raises(
        UserError,
        match="here: prepared with another tokeniser: token .* is [0-9]+ there and [0-9a-z]+ in the one given",
    ):
        refuse_other(tokenizer, other, "here")


def test_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size=258: a byte-level vocabulary has at least 259 tokens"):
        train_tokenizer(["x"], 258, tmp_path / "t")
    with pytest.raises(UserError, match="nothere: no such tokeniser; give a folder"):
        load_tokenizer(tmp_path / "nothere")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"not": "a tokeniser"}))
    with pytest.raises(UserError, match="holds no tokeniser that transformers can open"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: holds no tokeniser that transformers can open"):
        load_tokenizer(tmp_path / "empty")


def test_a_signal_ends_the_training_of_a_tokeniser(tmp_path: Path) -> None:
    """The texts are read in other threads, and never end."""

    def endless() -> Iterator[str]:
        yield from ["some text"] * 1000
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            yield "some text"

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(endless(), 300, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


def test_a_length_that_is_no_number_is_named(tmp_path):
    train_tokenizer(["some text"], 300, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for limit in ("x", {}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": limit}))
        with pytest.raises(UserError, match="model_max_length=.* is no number"):
            load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="a vocabulary has at most"):
        train_tokenizer(["some text"], 10**9, tmp_path)
