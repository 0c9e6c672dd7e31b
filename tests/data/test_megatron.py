"""Megatron-LM's .bin/.idx, written here by hand from its documentation; damaged pairs are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unmask.data import dataset_from, open_dataset, prepare
from unmask.data.arrays import read_index
from unmask.errors import UserError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def pair(
    path: Path, sequences: list[list[int]], documents: list[int], dtype: str = "uint16", modes: bytes = b""
) -> Path:
    """Write path.bin and path.idx; documents: the first sequence of each, and the number of sequences."""
    width = np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(documents))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    start = 0
    for sequence in sequences:
        index += struct.pack("<q", start)
        start += len(sequence) * width
    index += b"".join(struct.pack("<q", first) for first in documents) + modes
    path.with_suffix(".idx").write_bytes(index)
    data = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    path.with_suffix(".bin").write_bytes(data)
    return path.with_suffix(".idx")


def tokens(dataset: Any) -> list[list[int]]:
    return [dataset.document(index)[0].tolist() for index in range(len(dataset))]


def test_the_index_byte_for_byte(tmp_path: Path) -> None:
    """A pair of two sequences and two documents, as a hex dump shows it."""
    raw = bytes.fromhex(
        "4d4d4944494458 0000  0100000000000000  08  0200000000000000  0300000000000000"
        "03000000 01000000  0000000000000000 0600000000000000  0000000000000000 0100000000000000 0200000000000000"
    )
    index = pair(tmp_path / "a", [[7, 8, 9], [4]], [0, 1, 2])
    assert index.read_bytes() == raw
    dtype, offsets = read_index(index)
    assert dtype == np.dtype("<u2") and offsets.tolist() == [0, 3, 4]
    assert tokens(dataset_from(index)) == [[7, 8, 9], [4]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_documents_of_several_sequences(tmp_path: Path, dtype: str) -> None:
    pair(tmp_path / "a", [[7, 8], [9], [], [4, 5, 6]], [0, 2, 2, 4], dtype)
    for name in ("a.idx", "a.bin", "a", "a.*", "*.bin"):  # however the pair is named, and once
        assert tokens(dataset_from(tmp_path / name)) == [[7, 8, 9], [4, 5, 6]]
    manifest = prepare(tmp_path / "a", tmp_path / "out", None)
    assert (manifest.documents, manifest.tokens, manifest.vocabulary) == (2, 6, 10)
    assert tokens(open_dataset(tmp_path / "out", verify=True)) == [[7, 8, 9], [4, 5, 6]]


def test_prefixes_with_dots_and_trainers_exist_check(tmp_path: Path) -> None:
    from unmask.data.sources import exists

    pair(tmp_path / "v1", [[3]], [0, 1])
    (tmp_path / "v1.idx").rename(tmp_path / "corpus.v1_text_document.idx")
    (tmp_path / "v1.bin").rename(tmp_path / "corpus.v1_text_document.bin")
    assert exists(tmp_path / "corpus.v1_text_document")
    assert tokens(dataset_from(tmp_path / "corpus.v1_text_document")) == [[3]]


def edited(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


DAMAGES = [
    (lambda raw: edited(raw, 0, b"X"), "a.idx: not the index of a Megatron dataset"),
    (lambda raw: b"", "a.idx: not the index of a Megatron dataset"),
    (lambda raw: edited(raw, 9, b"\2"), "a.idx: a Megatron index of version 2, and version 1 is read"),
    (lambda raw: edited(raw, 17, b"\6"), "a.idx: its entries are floating-point numbers"),
    (lambda raw: edited(raw, 17, b"\x63"), r"a.idx: its entries are of an unknown type \(99\)"),
    (lambda raw: raw[:-1], "a.idx: 81 bytes where its header describes 82; copy it again"),
    (lambda raw: raw + b"\0\0", "a.idx: of several modalities; only text is read"),
    (lambda raw: edited(raw, 34, b"\2"), "a.idx: damaged: its sequences do not follow one another"),
    (lambda raw: edited(raw, 34, b"\xff\xff\xff\xff"), "a.idx: damaged: its sequences do not follow"),
    (lambda raw: edited(raw, 42, b"\2"), "a.idx: damaged: its sequences do not follow one another"),
    (lambda raw: edited(raw, 58, b"\1"), "a.idx: damaged: its documents do not follow one another"),
    (lambda raw: edited(raw, 74, b"\1"), "a.idx: damaged: its documents do not follow one another"),
    (lambda raw: edited(raw, 66, b"\3"), "a.idx: damaged: its documents do not follow one another"),
]


@pytest.mark.parametrize("damage, sentence", DAMAGES)
def test_damaged_indices(tmp_path: Path, damage: Any, sentence: str) -> None:
    index = pair(tmp_path / "a", [[7, 8, 9], [4]], [0, 1, 2])
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(UserError, match=sentence):
        prepare(index, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_damaged_data(tmp_path: Path) -> None:
    index = pair(tmp_path / "a", [[7, 8, 9], [4]], [0, 1, 2])
    data = tmp_path / "a.bin"
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(UserError, match="a.bin: 6 bytes where a.idx describes 8; copy both again"):
        dataset_from(index)
    data.unlink()
    with pytest.raises(UserError, match="a.bin: missing beside a.idx"):
        dataset_from(index)
    pair(tmp_path / "a", [], [0])
    with pytest.raises(UserError, match="no document in it"):
        dataset_from(index)
    with pytest.raises(UserError, match="leave --end-id"):
        dataset_from(index, end_id=0)
