"""Records in columns: Parquet files, and folders that `datasets` saved (`save_to_disk`). Read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from unmask.data.reading import KINDS, Reading
from unmask.data.records import Record, needed
from unmask.errors import UserError
from unmask.files import read_json

if TYPE_CHECKING:
    import pyarrow

#: Rows taken at once.
ROWS = 256
#: Bytes of a column chunk held while it is read, whatever the size of its row group.
BUFFER = 1 << 20
STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return ((path / STATE).is_file() and (path / "dataset_info.json").is_file()) or (path / SPLITS).is_file()


def read_parquet(path: Path, reading: Reading, done: int) -> Iterator[Record]:
    """The rows of a Parquet file, only the columns that records are made of."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, memory_map=False) as file:
            columns = _columns(file.schema_arrow.names, reading, path)
            rows = file.iter_batches(ROWS, columns=columns, use_threads=False)
            yield from _records(rows, file.metadata.num_rows, path, done, path.stat().st_size)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the disk's own trouble
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a whole Parquet file ({reason}); copy it again") from None


def read_saved_dataset(path: Path, reading: Reading, done: int) -> Iterator[Record]:
    """The rows of a folder that `datasets` saved, in the order that it was saved in."""
    table = _opened(path, reading.split)
    columns = _columns(table.column_names, reading, path)
    batches = table.select_columns(columns).with_format("arrow").iter(ROWS)
    yield from _records(batches, len(table), path, done, size_of_folder(path))


def size_of_folder(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _opened(path: Path, split: str | None) -> Any:
    from datasets import DatasetDict, load_from_disk

    _check_names(path)
    try:
        found = load_from_disk(str(path))
    except Exception as error:  # whatever a damaged folder makes this library raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: not a whole dataset of Hugging Face's `datasets` ({reason}); save it again") from None
    if isinstance(found, DatasetDict):
        return chosen_split(found, split, str(path))
    if split is not None and split != str(found.split):
        raise UserError(f"{path}: is one split ({found.split or 'without a name'}): leave --split (split=...) out")
    return found


def _check_names(path: Path) -> None:
    """UserError where the files of a saved dataset name others outside of their folder."""
    for file in [*path.glob("dataset_dict.json"), *path.glob("**/state.json")]:
        found = read_json(file, "save the dataset again")
        named = found.get("splits") if file.name == "dataset_dict.json" else found.get("_data_files")
        for each in named if isinstance(named, list) else []:
            name = each.get("filename") if isinstance(each, dict) else each
            if not isinstance(name, str) or PurePath(name).name != name:
                raise UserError(
                    f"{file}: names {str(name)[:200]!r}, which is not in its folder; save the dataset again"
                )


def chosen_split(splits: Mapping[str, Any], split: str | None, where: str) -> Any:
    """One of several splits, by name."""
    names = ", ".join(splits)
    if split is None:
        raise UserError(f"{where}: holds the splits {names}: choose one with `unmask prepare --split NAME` (split=...)")
    if split not in splits:
        raise UserError(f"{where}: has no split {split!r}; it holds {names}")
    return splits[split]


def _columns(names: list[str], reading: Reading, path: Path) -> list[str]:
    """Those of the columns that records are made of."""
    wanted = [reading.name(field) for kind in reading.kinds for field in KINDS[kind]]
    found = [name for name in wanted if name in names]
    given = {field for kind in reading.kinds for field in KINDS[kind] if reading.name(field) in names}
    if not (given & {"input_ids", "messages", "text"} or {"prompt", "response"} <= given):
        raise UserError(
            f"{path}: needs the columns {needed(reading)}, and has {', '.join(names) or 'none'}: name them with "
            f"`unmask prepare --field text={names[0] if names else 'COLUMN'}` (fields=...)"
        )
    return found


def _records(batches: Any, rows: int, path: Path, done: int, size: int) -> Iterator[Record]:
    number = 0
    batch: pyarrow.RecordBatch | pyarrow.Table
    for batch in batches:
        share = batch.nbytes // max(batch.num_rows, 1)
        for row in batch.to_pylist():
            read = done + size * (number + 1) // rows
            yield Record(without_nulls(row), f"{path}, row {number}", read, share)
            number += 1


def without_nulls(value: Any) -> Any:
    """Columns give every struct every field that some row has: a field that is null here was not written here."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(item) for item in value]
    return value
