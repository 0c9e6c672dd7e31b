"""Where documents come from: files and folders of them by their format, or records in memory; as a stream of items."""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from unmask.data.arrays import read_bin, read_megatron, read_npy
from unmask.data.arrow import is_saved_dataset, read_parquet, read_saved_dataset, size_of_folder, without_nulls
from unmask.data.reading import Reading
from unmask.data.records import PIECE, Bad, Item, Record, joined, split
from unmask.errors import UserError
from unmask.files import BOM

JSONL = frozenset({".jsonl", ".ndjson", ".json"})
#: What a folder is searched for; anything else is named by a pattern such as "notes/**/*.tex".
SUFFIXES = frozenset(
    ".txt .md .rst .jsonl .ndjson .parquet .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .rb .sh .sql .jl "
    ".lua .scala .kt .swift .php .pl .hs .ml .txt.gz .jsonl.gz .ndjson.gz .json.gz".split()
)
#: Bytes in a line of JSONL: what bounds memory, of a file that unpacks to much more than its size too.
LINE = 1 << 27


def find_files(source: str | Path | Iterable[str | Path]) -> list[Path]:
    """What a file, a folder (searched, hidden folders skipped), a pattern or several of these name, in order.

    All are files but folders that Hugging Face's `datasets` saved, which are one item. Of a Megatron pair it is the
    index.
    """
    if not isinstance(source, str | Path):
        return [path for item in source for path in find_files(item)]
    path = Path(source)
    if path.is_file():
        return [_index_of(path)]
    if path.is_dir():
        return _in_folder(path)
    if glob.has_magic(str(source)):
        names = sorted(Path(name) for name in glob.glob(str(source), recursive=True))
        found = dict.fromkeys(_index_of(name) for name in names if name.is_file() or is_saved_dataset(name))
        if not found:
            raise UserError(f"{source}: no file matches this pattern")
        return list(found)
    if path.with_name(path.name + ".idx").is_file():  # Megatron names a pair by what its files have in common
        return [path.with_name(path.name + ".idx")]
    raise UserError(f"{path}: no such file or folder")


def _in_folder(path: Path) -> list[Path]:
    if is_dataset(path):
        raise UserError(f"{path}: is a prepared dataset already; name the text it came from")
    if is_saved_dataset(path):
        return [path]
    found = sorted(file for file in _walk(path) if _suffix(file) in SUFFIXES)
    if not found:
        raise UserError(f"{path}: no text file in this folder; others are named by a pattern, such as {path}/**/*.x")
    return found


def _suffix(path: Path) -> str:
    """The suffix of a file, of two parts where it is compressed."""
    suffixes = path.name.lower().split(".")
    return "." + ".".join(suffixes[-2:] if suffixes[-1] == "gz" and len(suffixes) > 2 else suffixes[-1:])


def _index_of(path: Path) -> Path:
    index = path.with_suffix(".idx")
    return index if path.suffix == ".bin" and index.is_file() else path


def exists(source: str | Path) -> bool:
    """Whether a path is there, or a pattern matches something."""
    return Path(source).exists() or bool(glob.glob(str(source), recursive=True)) or Path(f"{source}.idx").is_file()


def is_dataset(path: Path) -> bool:
    """Whether a folder looks like one that `prepare` wrote."""
    return (path / "manifest.json").is_file() and (path / "offsets.npy").is_file()


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and not is_dataset(here / name)]
        yield from (here / name for name in names if not name.startswith(".") and (here / name).is_file())


def format_of(path: Path) -> str:
    """Which of READERS reads a path."""
    suffix = _suffix(path).removesuffix(".gz")
    if path.is_dir():
        return "datasets"
    return {".parquet": "parquet", ".npy": "npy", ".bin": "bin", ".idx": "megatron"}.get(
        suffix, "jsonl" if suffix in JSONL else "text"
    )


def size_of(path: Path) -> int:
    """Bytes that reading a path goes through."""
    if path.is_dir():
        return size_of_folder(path)
    data = path.with_suffix(".bin")
    return path.stat().st_size + (data.stat().st_size if path.suffix == ".idx" and data.is_file() else 0)


def read_files(paths: list[Path], reading: Reading) -> Iterator[Item]:
    """The documents of these files, whatever their formats. An empty file is no document.

    Raises UserError for a file that is damaged as a whole, and for a setting that none of these formats knows.
    """
    _refuse_settings({format_of(path) for path in paths}, reading)
    done = 0
    for path in paths:
        try:
            yield from READERS[format_of(path)](path, reading, done)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        done += size_of(path)


#: What each setting is for: the formats that know it.
SETTINGS = {
    "split": ("datasets records", "folders that Hugging Face's `datasets` saved"),
    "dtype": ("bin", "raw .bin files"),
    "end_id": ("bin npy megatron", "arrays of token ids"),
    "fields": ("jsonl parquet datasets records", "JSONL, Parquet and `datasets`"),
    "bos": ("text jsonl parquet datasets records", "documents made from text"),
    "eos": ("text jsonl parquet datasets records", "documents made from text"),
}


def _refuse_settings(formats: set[str], reading: Reading) -> None:
    for name, (known, what) in SETTINGS.items():
        if getattr(reading, name) != Reading.model_fields[name].default and not formats & set(known.split()):
            raise UserError(f"{name}={getattr(reading, name)} has no effect: it is for {what}, and there is none")


def read_records(records: Iterable[object], reading: Reading) -> Iterator[Item]:
    """The documents of texts and records in memory, such as a list or a datasets.Dataset."""
    _refuse_settings({"records"}, reading)
    for number, record in enumerate(records):
        data: object = {"text": record} if isinstance(record, str) else record
        if hasattr(records, "features"):  # a datasets.Dataset, in columns
            data = without_nulls(data)
        yield Record(data, f"record {number}")


def _text(path: Path, reading: Reading, done: int) -> Iterator[Item]:
    try:  # the whole file is checked before any of it is used
        empty = all(chunk.isspace() for chunk in _chunks(path))
    except UnicodeDecodeError:
        yield Bad(str(path), "not a UTF-8 text file")
        return
    if not empty:
        yield from joined(split(_chunks(path)), True, str(path), done + path.stat().st_size)


def _chunks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with _opened(path) as (file, _):
        while raw := file.read(PIECE):
            if text := decoder.decode(raw):
                yield text
    if text := decoder.decode(b"", final=True):
        yield text


def _jsonl(path: Path, reading: Reading, done: int) -> Iterator[Item]:
    with _opened(path) as (file, position):
        number = 0
        while line := file.readline(LINE + 1):
            number += 1
            if len(line) > LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(PIECE)
                yield Bad(
                    f"{path}:{number}", f"a line of more than {LINE >> 20} MiB; write long documents as text files"
                )
                continue
            text = (line.removeprefix(BOM) if number == 1 else line).strip()
            if text:
                yield Record(text, f"{path}:{number}", done + position(), len(text))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file's bytes, decompressed, and how far its own bytes have been read."""
    with open(path, "rb") as raw:
        if path.suffix.lower() != ".gz":
            yield raw, raw.tell
            return
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                yield cast(BinaryIO, file), raw.tell
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{path}: not a whole gzip file ({error}); copy it again, or decompress it") from None


Reader = Callable[[Path, Reading, int], Iterator[Item]]
#: By format: from a path, and how many bytes of other files were read before, to its items.
READERS: dict[str, Reader] = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": read_parquet,
    "datasets": read_saved_dataset,
    "npy": read_npy,
    "bin": read_bin,
    "megatron": read_megatron,
}
