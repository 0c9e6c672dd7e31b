"""Where documents come from: text files, folders of them, JSONL, or records in memory; as a stream of bounded pieces.

A record is {"text"}, {"prompt", "response"} (the prompt is context: never noised, never scored) or {"input_ids"[,
"loss_mask"]}; other fields are ignored. A record with several of these is read as ids, else as a pair, else as text.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unmask.errors import UserError

JSONL = frozenset({".jsonl", ".ndjson", ".json"})
#: What a folder is searched for; anything else is named by a pattern such as "notes/**/*.tex".
SUFFIXES = frozenset(
    ".txt .md .rst .jsonl .ndjson .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .rb .sh .sql .jl .lua .scala "
    ".kt .swift .php .pl .hs .ml".split()
)
#: Characters in a piece: what bounds memory, however long a document is.
PIECE = 1 << 17


class Bad(Exception):
    """One record that cannot be used: where it is and what is wrong with it."""

    def __init__(self, where: str, what: str):
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


@dataclass(frozen=True)
class Piece:
    """A part of a document: text or token ids, whether a loss may be taken on it, and whether the document ends."""

    content: str | np.ndarray
    supervised: bool | np.ndarray
    where: str
    last: bool
    #: Bytes of all sources read up to here.
    read: int = 0


def find_files(source: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files of a file, a folder (recursively, hidden folders skipped), a pattern or several of these, in order."""
    if not isinstance(source, str | Path):
        return [path for item in source for path in find_files(item)]
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        if is_dataset(path):
            raise UserError(f"{path}: is a prepared dataset already; name the text it came from")
        found = sorted(file for file in _walk(path) if file.suffix.lower() in SUFFIXES)
        if not found:
            raise UserError(
                f"{path}: no text file in this folder; others are named by a pattern, such as {path}/**/*.x"
            )
        return found
    if glob.has_magic(str(source)):
        found = sorted(Path(name) for name in glob.glob(str(source), recursive=True) if os.path.isfile(name))
        if not found:
            raise UserError(f"{source}: no file matches this pattern")
        return found
    raise UserError(f"{path}: no such file or folder")


def exists(source: str | Path) -> bool:
    """Whether a path is there, or a pattern matches something."""
    return Path(source).exists() or bool(glob.glob(str(source), recursive=True))


def is_dataset(path: Path) -> bool:
    """Whether a folder looks like one that `prepare` wrote."""
    return (path / "manifest.json").is_file() and (path / "offsets.npy").is_file()


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and not is_dataset(here / name)]
        yield from (here / name for name in names if not name.startswith(".") and (here / name).is_file())


def read_files(paths: list[Path]) -> Iterator[Piece | Bad]:
    """The documents of these files: one per text file, one per line of JSONL. An empty file is no document."""
    done = 0
    for path in paths:
        try:
            yield from _jsonl(path, done) if path.suffix.lower() in JSONL else _text(path, done)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        done += path.stat().st_size


def read_records(records: Iterable[Any]) -> Iterator[Piece | Bad]:
    """The documents of texts and records in memory, such as a list or a datasets.Dataset."""
    for number, record in enumerate(records):
        yield from _pieces_of({"text": record} if isinstance(record, str) else record, f"record {number}", 0)


def _text(path: Path, done: int) -> Iterator[Piece | Bad]:
    try:  # the whole file is checked before any of it is used
        empty = all(chunk.isspace() for chunk in _chunks(path))
    except UnicodeDecodeError:
        yield Bad(str(path), "not a UTF-8 text file")
        return
    if not empty:
        yield from _joined(split(_chunks(path)), True, str(path), done + path.stat().st_size)


def _chunks(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        yield from iter(lambda: file.read(PIECE), "")


def _jsonl(path: Path, done: int) -> Iterator[Piece | Bad]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield from _pieces_of(json.loads(text), where, done)
            except UnicodeDecodeError:
                yield Bad(where, "not UTF-8")
            except (ValueError, RecursionError) as error:
                yield Bad(where, f"not valid JSON ({getattr(error, 'msg', error)}); a record is one object on one line")


def _pieces_of(record: Any, where: str, read: int) -> Iterator[Piece | Bad]:
    try:
        if not isinstance(record, Mapping):
            raise Bad(where, f"a record is an object with named fields, not {_kind(record)}")
        given = {key for key, value in record.items() if value is not None}
        if "input_ids" in given:
            token, supervised = _ids(record, where)
            pieces = [Piece(token, supervised, where, True, read)]
        elif {"prompt", "response"} <= given:
            prompt, response = _string(record, "prompt", where), _string(record, "response", where)
            pieces = [Piece(text, False, where, False, read) for text in split([prompt])]
            pieces += _joined(split([response]), True, where, read)
        elif "text" in given:
            pieces = list(_joined(split([_string(record, "text", where)]), True, where, read))
        else:
            has = ", ".join(sorted(map(str, given))) or "nothing"
            raise Bad(where, f'needs "text", "prompt" and "response", or "input_ids"; it has {has}')
    except Bad as bad:
        yield bad
        return
    yield from pieces


def _string(record: Mapping[str, Any], field: str, where: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise Bad(where, f'"{field}" is {_kind(value)}, not a string')
    if field != "prompt" and not value.strip():
        raise Bad(where, f'"{field}" is empty')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Bad(where, f'"{field}" holds half of a surrogate pair, which is no character') from None
    return value


def _ids(record: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    token = _integers(record["input_ids"], "input_ids", where)
    if len(token) == 0:
        raise Bad(where, '"input_ids" is empty')
    if token.min() < 0:
        raise Bad(where, f'"input_ids" holds {token.min()}, which is no token id')
    if record.get("loss_mask") is None:
        return token, np.ones(len(token), bool)
    mask = _integers(record["loss_mask"], "loss_mask", where)
    if len(mask) != len(token):
        raise Bad(where, f'"loss_mask" has {len(mask)} entries for {len(token)} tokens')
    if not np.isin(mask, (0, 1)).all():
        raise Bad(where, '"loss_mask" holds something other than 0 and 1')
    return token, mask.astype(bool)


def _integers(value: Any, field: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged lists
        array = np.empty(1, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in ("iub" if field == "loss_mask" else "iu")):
        raise Bad(where, f'"{field}" is not a list of whole numbers')
    return array.astype(np.int64)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _joined(texts: Iterable[str], supervised: bool, where: str, read: int) -> Iterator[Piece]:
    """The pieces of one document, the last of them marked."""
    held: str | None = None
    for text in texts:
        if held is not None:
            yield Piece(held, supervised, where, False, read)
        held = text
    if held is not None:
        yield Piece(held, supervised, where, True, read)


def split(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text into pieces of at most PIECE characters, before the space between two words.

    Tokenisers part words there, so the pieces give the tokens that the whole would.
    """
    held = ""
    for chunk in chunks:
        for start in range(0, len(chunk), PIECE):
            held += chunk[start : start + PIECE]
            while len(held) > PIECE:
                cut = _word_start(held, PIECE)
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held


def _word_start(text: str, limit: int) -> int:
    """The last good place to cut text[:limit], or `limit` where there is none."""
    space = text.rfind(" ", 1, limit)
    while space > 0:
        if not (text[space - 1].isspace() or text[space + 1].isspace()):
            return space
        space = text.rfind(" ", 1, space)
    return limit
