"""What prepare writes is what was read; it appears whole or not at all."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unmask.data import Dataset, dataset_from, open_dataset, prepare
from unmask.errors import UserError


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def listed(dataset: Dataset) -> list[tuple[list[int], list[bool]]]:
    return [(token.tolist(), flags.tolist()) for token, flags in map(dataset.document, range(len(dataset)))]


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.py").write_text(text, encoding="utf-8")
    (folder / "empty.py").write_text("")
    return folder


def test_a_text_folder_round_trips(tmp_path: Path, folder: Path, texts: list[str], tokenizer: Any) -> None:
    manifest = prepare(folder, tmp_path / "out", tokenizer)
    dataset = open_dataset(tmp_path / "out", verify=True)
    expected = [[*ids(tokenizer, text), tokenizer.eos_token_id] for text in texts]
    assert [token for token, _ in listed(dataset)] == expected
    assert dataset.tokens == manifest.tokens == manifest.supervised == sum(map(len, expected))
    assert dataset.lengths.tolist() == [len(one) for one in expected]
    assert (manifest.dtype, manifest.vocabulary, manifest.sources) == ("uint16", 1000, ["source"])
    assert (tmp_path / "out" / "tokens.bin").stat().st_size == 2 * dataset.tokens
    assert not (tmp_path / "out" / "supervised.bin").exists()
    assert listed(dataset_from(folder, tokenizer)) == listed(dataset)
    assert listed(dataset_from(tmp_path / "out", tokenizer)) == listed(dataset)
    assert listed(dataset_from(texts, tokenizer)) == listed(dataset)


RECORDS: list[dict[str, Any]] = [
    {"text": "a text", "id": 7},
    {"prompt": "What is 1+1?", "response": " 2", "text": None},
    {"input_ids": [5, 6, 7]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
    {"prompt": "", "response": "é"},
]


def expected_records(tokenizer: Any) -> list[tuple[list[int], list[bool]]]:
    text, prompt, response = ids(tokenizer, "a text"), ids(tokenizer, "What is 1+1?"), ids(tokenizer, " 2")
    return [
        ([*text, 0], [True] * (len(text) + 1)),
        ([*prompt, *response, 0], [False] * len(prompt) + [True] * (len(response) + 1)),
        ([5, 6, 7], [True] * 3),
        ([5, 6, 7, 8], [False, True, False, True]),
        ([*ids(tokenizer, "é"), 0], [True] * (len(ids(tokenizer, "é")) + 1)),
    ]


def test_records_of_every_kind(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\ufeff" + "\n".join(json.dumps(record) for record in RECORDS), encoding="utf-8")
    manifest = prepare(file, tmp_path / "out", tokenizer)
    assert listed(open_dataset(tmp_path / "out")) == expected_records(tokenizer)
    assert manifest.supervised == sum(sum(flags) for _, flags in expected_records(tokenizer))
    assert listed(dataset_from(RECORDS, tokenizer)) == expected_records(tokenizer)
    unclosed = dataset_from(RECORDS[:1], tokenizer, eos=False)
    assert listed(unclosed)[0][0] == ids(tokenizer, "a text")


def test_a_hugging_face_dataset(tokenizer: Any) -> None:
    from datasets import Dataset as Table

    rows = [{"text": None, "prompt": None, "response": None, **record} for record in RECORDS[:2]]
    assert listed(dataset_from(Table.from_list(rows), tokenizer)) == expected_records(tokenizer)[:2]
    numbers = Table.from_list(RECORDS[3:4]).with_format("numpy")
    assert listed(dataset_from(numbers)) == expected_records(tokenizer)[3:4]


def test_ids_alone_need_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 70000]}\n{"input_ids": [2]}\n')
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", None)
    dataset = open_dataset(tmp_path / "out", verify=True)
    assert (manifest.dtype, manifest.vocabulary, dataset.tokenizer_path) == ("uint32", 70001, None)
    assert [token for token, _ in listed(dataset)] == [[1, 70000], [2]]


def test_truncation_in_a_tokenizer_file_is_not_obeyed(tokenizer_path: Path) -> None:
    from unmask.data import load_tokenizer

    short = load_tokenizer(tokenizer_path)
    short.backend_tokenizer.enable_truncation(4)
    assert dataset_from(["one two three four five six"], short).tokens == 1 + len(
        ids(load_tokenizer(tokenizer_path), "one two three four five six")
    )


def test_a_tokenizer_without_an_end_token(tokenizer_path: Path) -> None:
    from unmask.data import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        dataset_from(["a"], tokenizer)
    assert dataset_from(["a"], tokenizer, eos=False).tokens == 1
    assert dataset_from([{"input_ids": [5]}], tokenizer).tokens == 1  # which no end token closes anyway


def test_no_end_token_is_asked_for_only_of_text(tmp_path: Path, tokenizer: Any) -> None:
    np.save(tmp_path / "ids.npy", np.array([3, 4]))
    with pytest.raises(UserError, match="eos=False has no effect: it is for documents made from text, and there is"):
        prepare(tmp_path / "ids.npy", tmp_path / "out", None, eos=False)
    with pytest.raises(UserError, match="training data: eos=False has no effect: no document is made from text"):
        dataset_from([{"input_ids": [5]}], tokenizer, eos=False)
    assert not (tmp_path / "out").exists()


def test_progress_counts_bytes_and_documents(tmp_path: Path, folder: Path, tokenizer: Any) -> None:
    calls: list[tuple[int, int, int]] = []
    prepare(folder, tmp_path / "out", tokenizer, report=lambda *call: calls.append(call))
    total = sum(file.stat().st_size for file in folder.iterdir())
    assert len(calls) > 1
    assert calls == sorted(calls) and calls[-1] == (total, total, 40)


def test_outputs_that_are_refused(tmp_path: Path, folder: Path, tokenizer: Any) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(UserError, match="other: exists and is not a dataset; name another folder"):
            prepare(folder, other, tokenizer, force=force)
        with pytest.raises(UserError, match="notes.txt: exists and is not a dataset"):
            prepare(folder, other / "notes.txt", tokenizer, force=force)
    assert (other / "notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="is a prepared dataset already"):
        prepare(folder, tmp_path / "first", tokenizer)
        prepare(tmp_path / "first", tmp_path / "second", tokenizer)


def test_a_dataset_is_replaced_only_when_forced_and_only_by_a_whole_one(
    tmp_path: Path, folder: Path, tokenizer: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    prepare(folder, out, tokenizer)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="out: holds a dataset already; use --force to replace it"):
        prepare(folder, out, tokenizer)
    (folder / "030.py").write_bytes(b"\xff")
    with pytest.raises(UserError, match="030.py: not a UTF-8 text file"):
        prepare(folder, out, tokenizer, force=True)

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder / "000.py", out, tokenizer, force=True, report=interrupted)
    assert (out / "manifest.json").read_bytes() == before
    assert len(open_dataset(out, verify=True)) == 40
    assert prepare(folder / "000.py", out, tokenizer, force=True).documents == 1
    assert len(open_dataset(out, verify=True)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_the_same_source_gives_the_same_bytes(tmp_path: Path, folder: Path, tokenizer: Any) -> None:
    one, two = (prepare(folder, tmp_path / name, tokenizer) for name in ("one", "two"))
    assert one == two
    assert np.array_equal(np.load(tmp_path / "one" / "offsets.npy"), np.load(tmp_path / "two" / "offsets.npy"))


#: Not ru_maxrss, which a process takes over from the one that started it.
PEAK = """
import sys
from unmask.data import load_tokenizer, prepare
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
GROWTH = (
    PEAK
    + """
folder, tokenizer = sys.argv[1], load_tokenizer(sys.argv[2])
peaks = []
for name in ("short", "long"):
    prepare(f"{folder}/{name}.txt", f"{folder}/{name}", tokenizer)
    peaks.append(peak())
print(peaks[1] / peaks[0])
"""
)
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")


@linux
def test_memory_does_not_grow_with_the_document(tmp_path: Path, texts: list[str], tokenizer_path: Path) -> None:
    text = "\n".join(texts)
    for name, size in (("short", 1_500_000), ("long", 9_000_000)):
        (tmp_path / f"{name}.txt").write_text((text * (size // len(text) + 1))[:size], encoding="utf-8")
    program = [sys.executable, "-c", GROWTH, str(tmp_path), str(tokenizer_path)]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.15


COLUMNS = (
    PEAK
    + """
folder, rows = sys.argv[1:]
print(prepare(f"{folder}/{rows}.parquet", f"{folder}/{rows}", None).tokens, peak())
"""
)


@linux
def test_memory_does_not_grow_with_a_group_of_rows(tmp_path: Path) -> None:
    peaks = []
    for rows in (300, 15_000):
        _write_ids(tmp_path / f"{rows}.parquet", rows)
        program = [sys.executable, "-c", COLUMNS, str(tmp_path), str(rows)]
        result = subprocess.run(program, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        tokens, peak = map(int, result.stdout.split())
        assert tokens == 1000 * rows
        peaks.append(peak)
    assert (tmp_path / "15000.parquet").stat().st_size > 55e6
    assert peaks[1] < 1.15 * peaks[0]


def _write_ids(path: Path, rows: int) -> None:
    """Rows of 1,000 ids, in one group."""
    import pyarrow
    from pyarrow.parquet import write_table

    ids = pyarrow.array(np.arange(1000 * rows, dtype=np.int32) % 65_000)
    lists = pyarrow.FixedSizeListArray.from_arrays(ids, 1000).cast(pyarrow.list_(pyarrow.int32()))
    table = pyarrow.table({"input_ids": lists})
    write_table(table, path, row_group_size=rows, use_dictionary=False, compression="none")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_what_was_there(
    tmp_path: Path, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Wherever it comes: while records are encoded, or between the two renames that replace a dataset."""
    target = tmp_path / "prepared"
    prepare(folder, target, tokenizer)
    before, names = listed(open_dataset(target)), sorted(path.name for path in tmp_path.iterdir())

    def interrupt(*_: Any) -> None:
        raise error

    with pytest.raises(error):
        prepare(folder, target, tokenizer, force=True, report=interrupt)
    rename = Path.rename

    def half(path: Path, to: Path) -> Path:
        if path.name == target.name and path != target:
            raise error
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", half)
    with pytest.raises(error):
        prepare(folder, target, tokenizer, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert listed(open_dataset(target)) == before


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """What a full disk is to a process: writing beyond `size` bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("part", ["tokens.bin", "tokenizer/tokenizer.json"])
def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(
    tmp_path: Path, folder: Path, tokenizer: Any, part: str
) -> None:
    """The tokens do not fit, or they do and the tokeniser's copy, which another language writes, does not."""
    target, small = tmp_path / "prepared", folder / "000.py"
    prepare(small, target, tokenizer)
    before = listed(open_dataset(target))
    source = folder if part == "tokens.bin" else small
    size = (target / part).stat().st_size - 1
    assert part == "tokens.bin" or (target / "tokens.bin").stat().st_size < size
    with pytest.raises(UserError, match="prepared: cannot be written: .*; nothing is left there of it"):
        with files_no_larger_than(size):
            prepare(source, target, tokenizer, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "source"]
    assert listed(open_dataset(target, verify=True)) == before
