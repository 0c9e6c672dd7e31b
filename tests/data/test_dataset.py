"""Opening a dataset notices whatever is missing, cut short, altered or made with another tokeniser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unmask.data import load_tokenizer, open_dataset, prepare, train_tokenizer
from unmask.errors import UserError


@pytest.fixture
def path(tmp_path: Path, tokenizer: Any) -> Path:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "one two"}\n{"prompt": "three", "response": " four"}\n')
    prepare(source, tmp_path / "dataset", tokenizer)
    return tmp_path / "dataset"


def test_parts_of_a_document(path: Path) -> None:
    dataset = open_dataset(path)
    token, supervised = dataset.document(1)
    assert token.dtype == np.int64 and supervised.dtype == bool and len(token) == dataset.lengths[1]
    part, flags = dataset.document(1, 2, 4)
    assert np.array_equal(part, token[2:4]) and np.array_equal(flags, supervised[2:4])
    assert len(dataset.document(0, 2, 10_000)[0]) == dataset.lengths[0] - 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            dataset.document(index)


@pytest.mark.parametrize("name", ["tokens.bin", "supervised.bin", "offsets.npy", "tokenizer/tokenizer.json"])
def test_an_altered_byte_a_cut_and_a_missing_file(path: Path, name: str) -> None:
    file = path / name
    whole = file.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=f"{name}: altered since it was written"):
            open_dataset(path)
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"{name}: {len(whole) - 1} bytes where manifest.json says {len(whole)}"):
        open_dataset(path)
    file.unlink()
    with pytest.raises(UserError, match=f"{name}: missing from the dataset"):
        open_dataset(path)


def test_an_id_outside_of_the_vocabulary_is_named_by_document(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = np.fromfile(path / "tokens.bin", np.uint16)
    place = int(open_dataset(path).lengths[0]) + 1
    token[place] = 1000
    token.tofile(path / "tokens.bin")
    sentence = (
        "tokens.bin: damaged: document 1 holds the token id 1000, outside of the dataset's vocabulary of 1000; copy"
    )
    for chunk in (1 << 22, 3, 1):
        monkeypatch.setattr("unmask.data.dataset.CHUNK", chunk)
        with pytest.raises(UserError, match=sentence):
            open_dataset(path)
    monkeypatch.setattr("unmask.data.dataset.SCANNED", 0)  # as of a large one
    monkeypatch.setattr("unmask.data.checksums.WHOLE", 0)
    dataset = open_dataset(path)
    assert len(dataset.document(0)[0]) and len(dataset.document(1, 2)[0])
    with pytest.raises(UserError, match=sentence):
        dataset.document(1)
    with pytest.raises(UserError, match=sentence):
        open_dataset(path, verify=True)


def test_offsets_of_noise(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.data.checksums.WHOLE", 0)
    size = (path / "offsets.npy").stat().st_size
    (path / "offsets.npy").write_bytes(np.random.default_rng(0).bytes(size))
    with pytest.raises(UserError, match="offsets.npy: damaged; copy it again"):
        open_dataset(path)


def test_manifests_that_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none: no such dataset; make one with `unmask prepare`"):
        open_dataset(tmp_path / "none")
    with pytest.raises(UserError, match="not a prepared dataset"):
        open_dataset(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    for change, sentence in [
        ({"version": 2}, "manifest.json: format 2, and this version of unmask reads 1"),
        ({"documents": 3}, "offsets.npy: does not fit manifest.json"),
        ({"tokens": 1}, "manifest.json: contradicts itself about tokens.bin"),
        ({"documents": None}, "manifest.json: cannot be read"),
        ({"from_the_future": 1}, "manifest.json: cannot be read"),
    ]:
        (path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(UserError, match=sentence):
            open_dataset(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json: cannot be read"):
        open_dataset(path)


def test_tokenisers_that_fit_and_that_do_not(path: Path, tmp_path: Path, tokenizer_path: Path, tokenizer: Any) -> None:
    assert len(open_dataset(path, tokenizer)) == len(open_dataset(path, tokenizer_path)) == 2
    copy = open_dataset(path).tokenizer_path
    assert copy is not None
    assert load_tokenizer(copy).get_vocab() == tokenizer.get_vocab()
    grown = load_tokenizer(tokenizer_path)
    grown.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    assert len(open_dataset(path, grown)) == 2
    other = train_tokenizer(["nothing in common"], 300, tmp_path / "other")
    with pytest.raises(UserError, match="dataset: prepared with another tokeniser"):
        open_dataset(path, other)
