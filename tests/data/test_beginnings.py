"""What texts begin with: as the tokeniser itself does, in data, prompts and tasks alike; and texts that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from unmask.data import Packs, dataset_from, end_policy, load_tokenizer, open_dataset, prepare
from unmask.data.beginnings import begin_with, beginning, shown
from unmask.data.encoding import Encoder
from unmask.errors import UserError
from unmask.sampling.canvas import Fill

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}"
BOS, EOS = 1, 2


def words(*, begins: bool) -> PreTrainedTokenizerFast:
    """w0 to w9, a token a word, after <s>, </s> and what is unknown."""
    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(10)), "user", "assistant"]
    backend = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def test_auto_is_what_the_tokenizer_itself_puts_in_front() -> None:
    assert beginning(words(begins=True)) == (BOS,) and shown(words(begins=True)) == "<s>"
    assert beginning(words(begins=False)) == () == beginning(None) and shown(words(begins=False)) == "none"
    around = words(begins=True)
    around.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A $B", [("<s>", BOS), ("</s>", EOS)]
    )
    assert beginning(around) == (BOS,)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_what_is_set_stays_with_the_tokenizer(tmp_path: Path, begins: bool, bos: bool) -> None:
    """Also in plain transformers, and with the copy of a dataset; the one that was given is left alone."""
    own = words(begins=begins)
    told = begin_with(own, bos, "data.bos")
    assert beginning(told) == ((BOS,) if bos else ()) and beginning(own) == ((BOS,) if begins else ())
    prepare(text_file(tmp_path, "w1 w2"), tmp_path / "out", own, bos=bos)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.document(0)[0].tolist() == [*((BOS,) if bos else ()), 4, 5, EOS] and dataset.bos == beginning(told)
    assert load_tokenizer(tmp_path / "out/tokenizer")("w1")["input_ids"] == [*((BOS,) if bos else ()), 4]


def text_file(folder: Path, text: str) -> Path:
    (folder / "a.txt").write_text(text)
    return folder / "a.txt"


def test_a_tokenizer_without_such_a_token_is_refused() -> None:
    bare = words(begins=False)
    bare.bos_token = None
    with pytest.raises(UserError, match="data.bos=true: the tokeniser has no beginning-of-text token"):
        begin_with(bare, True, "data.bos")
    assert begin_with(bare, False, "data.bos") is bare
    with pytest.raises(UserError, match="data.bos=false has no effect without a tokeniser"):
        begin_with(None, False, "data.bos")


def test_documents_begin_so_once_and_do_not_learn_it() -> None:
    records = [
        {"text": "w1 w2"},
        {"text": "<s> w3"},
        {"prompt": "w4", "response": "w5 w6"},
        {"prompt": "", "response": "w5"},
        {"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]},
        {"input_ids": [9]},
    ]
    dataset = dataset_from(records, words(begins=True))
    found = [dataset.document(number) for number in range(len(dataset))]
    assert [token.tolist() for token, _ in found] == [
        [1, 4, 5, 2],
        [1, 6, 2],
        [1, 7, 8, 9, 2],
        [1, 8, 2],
        [1, 10, 11],
        [9],
    ]
    assert [flags.astype(int).tolist() for _, flags in found] == [
        [0, 1, 1, 1],
        [0, 1, 1],
        [0, 0, 1, 1, 1],
        [0, 1, 1],
        [0, 0, 1],
        [1],
    ]
    texts, pairs = ([documents for pack in Packs(dataset_from(some, words(begins=True)), 8) for documents in pack]
                    for some in (records[:2], records[2:3]))  # fmt: skip
    assert end_policy(texts, words(begins=True)) is None, "a text after its beginning token is no answer"
    assert end_policy(pairs, words(begins=True)) == "each answer (</s>)"


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(UserError, match="bos=True has no effect: no document is made from text"):
        dataset_from([{"input_ids": [3]}], words(begins=False), bos=True)


def test_every_part_of_a_document_that_is_cut_begins_so() -> None:
    packs = Packs(dataset_from([{"text": "w0 w1 w2 w3 w4 w5"}, {"input_ids": [3, 4, 5, 6, 7]}], words(begins=True)), 4)
    chunks = sorted((part for pack in packs for part in pack), key=lambda part: part.sample)
    assert [part.token.tolist() for part in chunks] == [[1, 3, 4, 5], [1, 6, 7, 8], [1, 2], [3, 4, 5, 6], [7]]
    assert [part.supervised.tolist()[0] for part in chunks] == [False, False, False, True, True]
    assert (packs.severed, packs.silent, packs.tokens) == (0, 0, 15)


# texts that go on


@pytest.fixture(scope="module")
def dummy_prefix() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is put before every text; spaces are a letter of their own."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    texts = ["one and one is two\nabc abcd bcd", "a b c d e\nf one. two, a b"] * 20
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_a_text_that_goes_on_has_no_space_before_it(dummy_prefix: Any) -> None:
    encoder = Encoder(dummy_prefix, eos=False)
    for text, first in [("one and one is two", 4), ("abcabcabcd", 5), ("a b\nc", 3), ("one\n\ntwo", 4)]:
        parts = [ids.tolist() for ids in encoder.encode([text[:first], text[first:]], [False, True])]
        assert dummy_prefix.decode(sum(parts, [])) == text
        alone = encoder.encode([text[first:]])[0].tolist()
        assert len(alone) > len(parts[1]) or dummy_prefix.decode(parts[0] + alone) != text


def test_long_texts_and_responses_are_their_text(dummy_prefix: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Cut without a space to cut at, read from a file; and a response as it follows its prompt."""
    monkeypatch.setattr("unmask.data.records.PIECE", 64)
    monkeypatch.setattr("unmask.data.encoding.CHARACTERS", 100)
    text = "abcd" * 40 + " one and one"
    record = {"prompt": "one and ", "response": "two" * 50}
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps(record))
    sizes: list[int] = []
    encode = Encoder._encode
    monkeypatch.setattr(
        Encoder, "_encode", lambda self, texts: sizes.append(sum(map(len, texts))) or encode(self, texts)
    )
    dataset = dataset_from(str(tmp_path / "a.jsonl"), dummy_prefix, eos=False)
    assert max(sizes) < 100 + 64, "what is encoded at once is bounded, however long a line is"
    said = [dummy_prefix.decode(dataset.document(number)[0]) for number in range(2)]
    assert said == [text, record["prompt"] + record["response"]]


def test_byte_level_tokenizers_need_nothing(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, eos=False)
    assert np.array_equal(*encoder.encode(["return x", "return x"], [False, True]))
    assert encoder._joints == [("", [])]


def test_prompts_and_holes(dummy_prefix: Any) -> None:
    from tests.sampling.reference import tiny
    from unmask.objectives import Decoding
    from unmask.sampling.options import Options
    from unmask.sampling.session import Session

    model, _ = tiny()
    prompts = ["w1 w2", "", "<s> w1", [4, 5], Fill(("w1", "w2"), (1,)), Fill(("", "w2"), (1,))]
    with_blocks = Decoding("block", 4, False)
    session = Session(model, words(begins=True), Options(), with_blocks)
    moved = session.canvas(Fill(("w0 w1 w2 w3", "w4 w5 w6"), (3,)))
    assert moved.dropped == 1 and moved.token[:4].tolist() == [1, 4, 5, 6], "the grid moves, and the beginning stays"
    given = []
    for prompt in prompts:
        options = Options() if isinstance(prompt, Fill) else Options(length=2)
        session = Session(model, words(begins=True), options, Decoding("full", None, False))
        given.append(session.canvas(prompt))
    assert [canvas.token[~canvas.open].tolist() for canvas in given] == [
        [1, 4, 5], [1], [1, 4], [4, 5], [1, 4, 5], [1, 5],
    ]  # fmt: skip
