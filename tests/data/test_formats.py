"""Every format gives the documents that the same records give as plain JSONL; damaged files are one sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unmask.data import Dataset, Reading, arrays, dataset_from, open_dataset, prepare
from unmask.errors import UserError

RECORDS: list[dict[str, Any]] = [
    {"text": "a text", "other": 1},
    {"prompt": "What is 1+1?", "response": " 2"},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
    {"text": "another one", "other": 2},
]


def listed(dataset: Dataset) -> list[tuple[list[int], list[bool]]]:
    return [(token.tolist(), flags.tolist()) for token, flags in map(dataset.document, range(len(dataset)))]


def tokens(dataset: Dataset) -> list[list[int]]:
    return [token for token, _ in listed(dataset)]


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def expected(tokenizer: Any) -> list[tuple[list[int], list[bool]]]:
    return listed(dataset_from(RECORDS, tokenizer))


def parquet(path: Path, records: list[dict[str, Any]], **options: Any) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(records, schema=_schema(records)), path, **options)
    return path


def _schema(records: list[dict[str, Any]]) -> Any:
    import pyarrow

    names = dict.fromkeys(name for record in records for name in record)
    return pyarrow.schema(
        [(name, pyarrow.array([record[name] for record in records if name in record]).type) for name in names]
    )


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.gz", "a.json.gz", "A.JSONL.GZ"])
def test_compressed_json_lines(tmp_path: Path, tokenizer: Any, expected: Any, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(lines(RECORDS)))
    assert listed(dataset_from(tmp_path / name, tokenizer)) == expected
    assert listed(dataset_from(tmp_path, tokenizer)) == expected  # found in a folder


def test_compressed_text(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("héllo".encode()))
    assert tokens(dataset_from(tmp_path, tokenizer)) == tokens(dataset_from(["héllo"], tokenizer))


def test_progress_through_compressed_files_counts_their_own_bytes(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS * 500)))
    calls: list[tuple[int, int, int]] = []
    prepare(tmp_path / "a.jsonl.gz", tmp_path / "out", tokenizer, report=lambda *call: calls.append(call))
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    assert calls == sorted(calls) and calls[-1] == (size, size, 2000) and calls[0][0] <= size


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: raw[:40] + b"\0" * 20 + raw[60:], lambda raw: b"no" + raw]
)
def test_damaged_gzip_files(tmp_path: Path, tokenizer: Any, damage: Any) -> None:
    raw = gzip.compress(np.random.default_rng(0).bytes(400) + lines(RECORDS * 50))
    (tmp_path / "a.jsonl.gz").write_bytes(damage(raw))
    with pytest.raises(UserError, match=r"a.jsonl.gz: not a whole gzip file \(.*\); copy it again, or decompress it"):
        prepare(tmp_path / "a.jsonl.gz", tmp_path / "out", tokenizer, skip_bad=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]


def test_parquet(tmp_path: Path, tokenizer: Any, expected: Any) -> None:
    parquet(tmp_path / "a.parquet", RECORDS[:2], row_group_size=1)
    parquet(tmp_path / "b.parquet", RECORDS[2:], compression="zstd")
    assert listed(dataset_from(tmp_path / "a.parquet", tokenizer)) == expected[:2]
    assert listed(dataset_from(tmp_path, tokenizer)) == expected
    manifest = prepare(tmp_path, tmp_path / "out", tokenizer)
    assert manifest.documents == 4 and listed(open_dataset(tmp_path / "out", verify=True)) == expected


def test_a_bad_row_of_parquet_is_named_and_skipped(tmp_path: Path, tokenizer: Any) -> None:
    file = parquet(tmp_path / "a.parquet", [{"text": "one"}, {"text": " "}, {"text": "two"}])
    with pytest.raises(UserError, match=r'a.parquet, row 1: "text" is empty; fix it or use --skip-bad'):
        prepare(file, tmp_path / "out", tokenizer)
    manifest = prepare(file, tmp_path / "out", tokenizer, skip_bad=True)
    assert (manifest.documents, manifest.skipped) == (2, 1)


def test_columns_and_fields_by_other_names(tmp_path: Path, tokenizer: Any) -> None:
    file = parquet(tmp_path / "a.parquet", [{"id": 1, "content": "one"}, {"id": 2, "content": "two"}])
    with pytest.raises(
        UserError,
        match=r'a.parquet: needs the columns "text", .*and has id, content: name them with `unmask prepare --field',
    ):
        dataset_from(file, tokenizer)
    with pytest.raises(UserError, match=r'needs the columns "body", and has id, content'):
        dataset_from(file, tokenizer, fields={"text": "body"})
    named = dataset_from(file, tokenizer, fields={"text": "content"})
    assert tokens(named) == tokens(dataset_from(["one", "two"], tokenizer))
    # Records are then of that kind, even those that have the fields of another.
    (tmp_path / "b.jsonl").write_bytes(lines([{"text": "x", "q": "one", "a": "two"}, {"text": "x"}]))
    pair = {"prompt": "q", "response": "a"}
    with pytest.raises(UserError, match='b.jsonl:2: needs "q" and "a"; it has text'):
        dataset_from(tmp_path / "b.jsonl", tokenizer, fields=pair)
    (tmp_path / "b.jsonl").write_bytes(lines([{"text": "x", "q": "one", "a": "two"}]))
    assert listed(dataset_from(tmp_path / "b.jsonl", tokenizer, fields=pair)) == listed(
        dataset_from([{"prompt": "one", "response": "two"}], tokenizer)
    )


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"fields": {"txt": "a"}}, r"fields: 'txt' is no field of a record \(did you mean 'text'\?\)"),
        ({"fields": {"text": "a", "prompt": "b"}}, "fields of different kinds of records"),
        ({"split": "train"}, "split=train has no effect: it is for folders that Hugging Face's `datasets` saved"),
        ({"dtype": "uint16"}, "dtype=uint16 has no effect: it is for raw .bin files"),
        ({"end_id": 0}, "end_id=0 has no effect: it is for arrays of token ids"),
        ({"supervise": "last"}, "supervise=last has no effect: no record has messages"),
        ({"supervise": "first"}, "supervise='first'"),
        ({"workers": -1}, "workers=-1"),
        ({"splitt": "train"}, r"unknown key 'splitt' \(did you mean 'split'\?\)"),
        ({"dtype": "float32"}, "dtype='float32'"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, tokenizer: Any, options: dict[str, Any], sentence: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(RECORDS))
    with pytest.raises(UserError, match=sentence):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, **options)
    assert not (tmp_path / "out").exists()


def test_damaged_parquet(tmp_path: Path, tokenizer: Any) -> None:
    file = parquet(tmp_path / "a.parquet", RECORDS[:1])
    raw = file.read_bytes()
    for damaged in (b"", raw[:-5], b"PAR1" + b"\0" * 40 + b"PAR1"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="a.parquet: not a whole Parquet file"):
            dataset_from(file, tokenizer)


def test_a_saved_hugging_face_dataset(tmp_path: Path, tokenizer: Any, expected: Any) -> None:
    from datasets import Dataset as Table
    from datasets import DatasetDict

    table = Table.from_list([{"text": "a text"}, {"text": "another one"}, {"text": "third"}])
    # A selection in another order is saved as indices beside the table.
    table.select([1, 0]).save_to_disk(str(tmp_path / "one"))
    other = [expected[3], expected[0]]
    assert listed(dataset_from(tmp_path / "one", tokenizer)) == other
    manifest = prepare(tmp_path / "one", tmp_path / "out", tokenizer)
    assert manifest.documents == 2 and listed(open_dataset(tmp_path / "out")) == other
    DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(str(tmp_path / "both"))
    assert len(dataset_from(tmp_path / "both", tokenizer, split="train")) == 3
    assert tokens(dataset_from(tmp_path / "both", tokenizer, split="test")) == tokens(
        dataset_from(["third"], tokenizer)
    )
    splits = DatasetDict({"train": table, "test": table.select([2])})
    assert len(dataset_from(splits, tokenizer, split="train")) == 3
    for options, sentence in [
        ({}, "both: holds the splits train, test: choose one with `unmask prepare --split NAME`"),
        ({"split": "dev"}, "both: has no split 'dev'; it holds train, test"),
        ({"split": "train", "fields": {"text": "body"}}, 'both: needs the columns "body", and has text'),
    ]:
        with pytest.raises(UserError, match=sentence):
            dataset_from(tmp_path / "both", tokenizer, **options)
    with pytest.raises(UserError, match="one: is one split .*: leave --split"):
        dataset_from(tmp_path / "one", tokenizer, split="train")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(UserError, match="one: not a whole dataset of Hugging Face's `datasets`"):
        dataset_from(tmp_path / "one", tokenizer)


def test_columns_of_structures_lose_the_fields_that_other_rows_brought(tmp_path: Path) -> None:
    from datasets import Dataset as Table

    from unmask.data.sources import read_files, read_records

    messages = [[{"role": "user", "content": "a"}], [{"role": "assistant", "tool_calls": [{"name": "f"}]}]]
    file = parquet(tmp_path / "a.parquet", [{"messages": one} for one in messages])
    assert [item.data["messages"] for item in read_files([file], Reading())] == messages  # type: ignore[union-attr]
    table = Table.from_list([{"messages": one} for one in messages])
    assert [item.data["messages"] for item in read_records(table, Reading())] == messages  # type: ignore[union-attr]


def test_numpy_arrays(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = np.array([5, 6, 0, 7, 0, 0, 8], np.uint16)
    np.save(tmp_path / "flat.npy", flat)
    np.save(tmp_path / "rows.npy", np.arange(3, 15, dtype=np.int64).reshape(3, 4))
    for piece in (1 << 17, 3, 2, 1):  # however it is read
        monkeypatch.setattr(arrays, "PIECE", piece)
        assert tokens(dataset_from(tmp_path / "flat.npy", tokenizer)) == [flat.tolist()]
        cut = dataset_from(tmp_path / "flat.npy", tokenizer, end_id=0)
        assert tokens(cut) == [[5, 6, 0], [7, 0], [0], [8]]
        rows = dataset_from(tmp_path / "rows.npy", tokenizer)
        assert tokens(rows) == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]]
        assert tokens(dataset_from(tmp_path / "rows.npy", None, end_id=8))[1:3] == [[7, 8], [9, 10]]


def test_raw_arrays(tmp_path: Path) -> None:
    for dtype in ("uint16", "int32", "int64", "uint8"):
        np.array([5, 6, 0, 7], dtype).tofile(tmp_path / "a.bin")
        assert tokens(dataset_from(tmp_path / "a.bin", None, dtype=dtype, end_id=0)) == [[5, 6, 0], [7]]
    with pytest.raises(
        UserError, match="a.bin: the type of these ids is not known: give `unmask prepare --dtype uint16`"
    ):
        dataset_from(tmp_path / "a.bin")
    with pytest.raises(UserError, match="a.bin: 4 bytes are no whole number of int64: cut short, or of another type"):
        dataset_from(tmp_path / "a.bin", dtype="int64")


@pytest.mark.parametrize(
    "array, sentence",
    [
        (np.array([3, 1000]), "a.npy, document 0: token id 1000 is outside the tokeniser's vocabulary of 1000"),
        (np.array([[3, 4], [-1, 4]]), "a.npy, document 1: -1 is no token id"),
        (np.array([[3, 4], [1, 4]]), "a.npy, document 1: contains the mask token '<|mask|>'"),
        (np.array([1.5]), "a.npy: 1-dimensional float64: token ids are whole numbers"),
        (np.zeros((1, 1, 1), int), "a.npy: 3-dimensional int64"),
        (np.array([{}]), "a.npy: not a whole .npy array"),
        (np.array([], int), "a.npy: no document in it"),
    ],
)
def test_sentences_about_arrays(tmp_path: Path, tokenizer: Any, array: np.ndarray, sentence: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=sentence):
        dataset_from(tmp_path / "a.npy", tokenizer)


def test_a_truncated_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    raw = (tmp_path / "a.npy").read_bytes()
    noise = np.random.default_rng(0).bytes(1000)
    for damaged in (raw[:-1], raw[:5], b"", noise, raw[:6] + noise):
        (tmp_path / "a.npy").write_bytes(damaged)
        with pytest.raises(UserError, match="a.npy: not a whole .npy array") as caught:
            dataset_from(tmp_path / "a.npy")
        assert "pickle" not in str(caught.value)


def test_a_faulty_document_of_an_array_is_skipped_whole(tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(arrays, "PIECE", 3)
    monkeypatch.setattr("unmask.data.encoding.BATCH", 2)
    np.save(tmp_path / "a.npy", np.array([[3, 4, 5, 6, 7, 8], [3, 4, 5, 9999, 7, 8], [8, 7, 6, 5, 4, 3]]))
    manifest = prepare(tmp_path / "a.npy", tmp_path / "out", tokenizer, skip_bad=True)
    assert (manifest.documents, manifest.skipped) == (2, 1)
    assert tokens(open_dataset(tmp_path / "out", verify=True)) == [[3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3]]


def test_a_saved_dataset_leads_nowhere_else(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    for name in ("one", "two"):
        datasets.Dataset.from_dict({"text": [name]}).save_to_disk(str(tmp_path / name))
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(str(tmp_path / "both"))
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    file = state["_data_files"][0]["filename"]
    for where in (f"../two/{file}", str(tmp_path / "two" / file)):
        state["_data_files"][0]["filename"] = where
        (tmp_path / "one" / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match="which is not in its folder"):
            dataset_from(tmp_path / "one", tokenizer)
    (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": ["../two"]}))
    with pytest.raises(UserError, match="which is not in its folder"):
        dataset_from(tmp_path / "both", tokenizer, split="../two")
