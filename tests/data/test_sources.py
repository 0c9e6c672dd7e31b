"""Which files are read, how long texts are cut, and the one sentence each malformed record gets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.data import dataset_from, encoding, prepare, records, sources
from unmask.data.reading import Reading
from unmask.data.records import split
from unmask.data.sources import find_files
from unmask.errors import UserError


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_a_folder_is_searched_in_order_without_hidden_parts(tmp_path: Path) -> None:
    write(
        tmp_path, {"b.txt": "b", "a/z.py": "z", "a/.hidden.py": "h", ".git/c.txt": "c", "a/d.bin": "d", "e.jsonl": "{}"}
    )
    names = [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path)]
    assert names == ["a/z.py", "b.txt", "e.jsonl"]
    assert [path.name for path in find_files(f"{tmp_path}/**/*.bin")] == ["d.bin"]
    assert [path.name for path in find_files([tmp_path / "b.txt", tmp_path / "a"])] == ["b.txt", "z.py"]


def test_a_dataset_inside_the_folder_is_not_text(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"a.txt": "words"})
    for _ in range(2):
        assert prepare(tmp_path, tmp_path / "dataset", tokenizer, force=True).documents == 1


@pytest.mark.parametrize(
    "files, source, sentence",
    [
        ({}, "", "no text file in this folder"),
        ({"x.bin": "x"}, "", "no text file in this folder"),
        ({}, "none.txt", "none.txt: no such file or folder"),
        ({}, "*.xyz", r"\*.xyz: no file matches this pattern"),
        ({"a.txt": " \n\n"}, "", "no document in it"),
        ({"a.jsonl": "\n"}, "a.jsonl", "a.jsonl: no document in it"),
        ({"a.txt": b"ab\xff"}, "", "a.txt: not a UTF-8 text file; fix it or use --skip-bad"),
    ],
)
def test_sentences_about_files(
    tmp_path: Path, tokenizer: Any, files: dict[str, Any], source: str, sentence: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(UserError, match=sentence):
        prepare(tmp_path / source, tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


BAD_LINES = [
    ("{", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    (b'{"text": "\xff"}', "not UTF-8"),
    ('"text"', "a record is an object with named fields, not a string"),
    ("{}", 'needs "text", "messages", "prompt" and "response", or "input_ids"; it has nothing'),
    ("null", "a record is an object with named fields, not null"),
    ('{"prompt": "a", "answer": "b"}', "it has answer, prompt"),
    ('{"text": null}', "it has nothing"),
    ('{"text": 3}', '"text" is a number, not a string'),
    ('{"text": ["a"]}', '"text" is a list, not a string'),
    ('{"text": " "}', '"text" is empty'),
    ('{"text": "\\ud800"}', '"text" holds half of a surrogate pair'),
    ('{"prompt": "a", "response": ""}', '"response" is empty'),
    ('{"prompt": true, "response": "a"}', '"prompt" is a boolean, not a string'),
    ('{"input_ids": []}', '"input_ids" is'),
    ('{"input_ids": [1.5]}', '"input_ids" is not a list of whole numbers'),
    ('{"input_ids": [[1], [2, 3]]}', '"input_ids" is not a list of whole numbers'),
    ('{"input_ids": "ab"}', '"input_ids" is not a list of whole numbers'),
    ('{"input_ids": [5, -1]}', "-1 is no token id"),
    ('{"input_ids": [5, 1000]}', "token id 1000 is outside the tokeniser's vocabulary of 1000"),
    ('{"input_ids": [99999999999999999999999]}', '"input_ids" is not a list of whole numbers'),
    ('{"input_ids": [5, 6], "loss_mask": [1]}', '"loss_mask" has 1 entries for 2 tokens'),
    ('{"input_ids": [5, 6], "loss_mask": [1, 2]}', '"loss_mask" holds something other than 0 and 1'),
]


@pytest.mark.parametrize("line, sentence", BAD_LINES, ids=lambda value: None if len(value) > 60 else str(value))
def test_sentences_about_lines(tmp_path: Path, tokenizer: Any, line: str | bytes, sentence: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    file = write(tmp_path, {"a.jsonl": b'{"text": "one"}\n\n' + raw + b'\n{"text": "two"}\n'}) / "a.jsonl"
    with pytest.raises(UserError, match=sentence) as caught:
        prepare(file, tmp_path / "out", tokenizer)
    said = str(caught.value)
    assert said.startswith(f"{file}:3: ") and said.endswith("; fix it or use --skip-bad") and "\n" not in said
    with pytest.raises(UserError, match="a.jsonl:3: .*leave it out with `unmask prepare --skip-bad`"):
        dataset_from(file, tokenizer)
    manifest = prepare(file, tmp_path / "out", tokenizer, skip_bad=True)
    assert (manifest.documents, manifest.skipped) == (2, 1)
    assert manifest.examples[0].startswith(f"{file}:3: ")


def test_records_in_memory_are_named_by_number(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r'^record 1: "text" is empty$'):
        dataset_from(["a", ""], tokenizer)
    with pytest.raises(UserError, match="one split, not a mapping of train, test"):
        dataset_from({"train": [], "test": []}, tokenizer)
    with pytest.raises(UserError, match="not int"):
        dataset_from(3, tokenizer)
    with pytest.raises(UserError, match="training data: no document in it"):
        dataset_from([], tokenizer)
    with pytest.raises(UserError, match="text needs a tokeniser"):
        dataset_from(["a"], None)


@given(chunks=st.lists(st.text(alphabet="ab \n", max_size=30), max_size=12))
def test_cutting_loses_nothing_and_keeps_to_the_limit(chunks: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "PIECE", 16)
        pieces = list(split(chunks))
    assert "".join(pieces) == "".join(chunks)
    assert all(0 < len(piece) <= 16 for piece in pieces)


def test_a_long_text_has_the_same_tokens_in_pieces(
    tmp_path: Path, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = max(texts, key=len)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    write(tmp_path, {"a.txt": text, "b.jsonl": json.dumps({"prompt": text, "response": text})})
    monkeypatch.setattr(records, "PIECE", 3000)
    monkeypatch.setattr(encoding, "CHARACTERS", 5000)
    assert len(text) > 30_000
    dataset = dataset_from(tmp_path, tokenizer)
    assert dataset.document(0)[0].tolist() == [*whole, 0]
    token, supervised = dataset.document(1)
    assert token.tolist() == [*whole, *whole, 0]
    assert np.array_equal(supervised, np.arange(len(token)) >= len(whole))


def test_a_bad_part_takes_the_whole_of_a_long_document_with_it(
    tmp_path: Path, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = max(texts, key=len)
    middle = len(text) // 2
    write(tmp_path, {"a.txt": "first", "b.txt": text[:middle] + "\u2603" + text[middle:], "c.txt": "last"})
    monkeypatch.setattr(
        encoding.Encoder,
        "fault",
        lambda _, token, given: "holds a snowman" if "\u2603" in tokenizer.decode(token) else None,
    )
    monkeypatch.setattr(records, "PIECE", 3000)
    monkeypatch.setattr(encoding, "CHARACTERS", 5000)
    manifest = prepare(tmp_path, tmp_path / "out", tokenizer, skip_bad=True)
    assert (manifest.documents, manifest.skipped) == (2, 1)
    from unmask.data import open_dataset

    dataset = open_dataset(tmp_path / "out", verify=True)
    assert [tokenizer.decode(dataset.document(index)[0][:-1]) for index in range(2)] == ["first", "last"]


def test_a_text_that_spells_the_mask_token_is_read_as_plain_characters(tokenizer: Any) -> None:
    text = "mask: <|mask|> and end: <|endoftext|>"
    token, _ = dataset_from([text, "plain <|endoftext|>"], tokenizer).document(0)
    assert tokenizer.mask_token_id not in token
    assert tokenizer.decode(token[:-1]) == text
    # A text without it keeps what it always meant: written-out special tokens count as such.
    other, _ = dataset_from([text, "plain <|endoftext|>"], tokenizer).document(1)
    assert list(other[-2:]) == [tokenizer.eos_token_id] * 2


def test_a_pattern_exists_when_it_matches(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a"})
    assert sources.exists(tmp_path / "a.txt") and sources.exists(f"{tmp_path}/*.txt")
    assert not sources.exists(f"{tmp_path}/*.md")


def test_damage_to_an_array_of_ids_is_one_sentence(tmp_path: Path) -> None:
    """The header of a .npy file is Python source: whatever stands there, numpy's readers raise many things."""
    np.save(tmp_path / "a.npy", np.arange(7))
    whole = (tmp_path / "a.npy").read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(150):
        place, length = int(generator.integers(0, 128)), int(generator.integers(0, 9))
        noise = bytes(generator.choice(np.frombuffer(b"([{'\",:}])#\\\n0e-<\x00\xff", np.uint8), length))
        (tmp_path / "a.npy").write_bytes(whole[:place] + noise + whole[place + int(generator.integers(0, 9)) :])
        try:
            dataset_from(tmp_path / "a.npy", None)
        except UserError as told:
            assert "\n" not in str(told)


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sources, "LINE", 100)
    lines = [b'{"input_ids": [1, 2]}', b'{"input_ids": [' + b"1, " * 200_000 + b"1]}", b'{"input_ids": [3]}']
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    with pytest.raises(UserError, match=r"a.jsonl.gz:2: a line of more than 0 MiB; write long documents as text"):
        dataset_from(tmp_path / "a.jsonl.gz", None)
    items = list(sources.READERS["jsonl"](tmp_path / "a.jsonl.gz", Reading(), 0))
    assert [type(item).__name__ for item in items] == ["Record", "Bad", "Record"]  # the lines after it are read
