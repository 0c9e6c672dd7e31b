"""From records to pieces of documents: texts, conversations, pairs and token ids.

A record is {"text"}, {"messages"[, "tools"]}, {"prompt", "response"} (the prompt is context: never noised, never
scored) or {"input_ids"[, "loss_mask"]}; other fields are ignored. A record of several kinds is read as ids, else as a
conversation, else as a pair, else as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from unmask.data.reading import Reading
from unmask.parsing import json_value

#: Characters (or ids) in a piece: what bounds memory, however long a document is.
PIECE = 1 << 17


class Bad(Exception):
    """One record that cannot be used: where it is and what is wrong with it.

    setting: nothing is wrong with the record, but it needs a setting that was not given; such a one is never skipped.
    """

    def __init__(self, where: str, what: str, setting: bool = False):
        super().__init__(where, what, setting)
        self.where, self.what, self.setting = where, what, setting

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Spans(NamedTuple):
    """Which characters of a text are learnt from: [start, stop) of each stretch, rising.

    exact: a token across the start or the end of a stretch is refused; else it is learnt from.
    """

    stretches: list[tuple[int, int]]
    exact: bool


class Template(Protocol):
    """Writes conversations as text: see `unmask.data.chat`."""

    def render(self, messages: Any, tools: Any, where: str) -> tuple[str, Spans]: ...


@dataclass(frozen=True)
class Piece:
    """A part of a document: text or token ids, where a loss may be taken on it, and whether the document ends."""

    content: str | np.ndarray
    supervised: bool | np.ndarray | Spans
    where: str
    last: bool
    #: Bytes of all sources read up to here.
    read: int = 0
    #: Whether it goes on with a document, rather than beginning one.
    follows: bool = False

    @property
    def size(self) -> int:
        return len(self.content)


@dataclass(frozen=True)
class Record:
    """A record that is still to be taken apart: a line of JSON (bytes), or a mapping."""

    data: Any
    where: str
    read: int = 0
    #: About how many bytes it takes.
    size: int = 0


#: What readers give: parts of documents, records, and what could not be read.
Item = Piece | Record | Bad


def pieces_of(record: Record, reading: Reading, template: Template) -> list[Piece | Bad]:
    """The pieces of one document, or what is wrong with the record."""
    try:
        data = _parsed(record) if isinstance(record.data, bytes) else record.data
        if not isinstance(data, Mapping):
            raise Bad(record.where, f"a record is an object with named fields, not {_kind(data)}")
        return _taken_apart(data, record, reading, template)
    except Bad as bad:
        return [bad]


def _parsed(record: Record) -> Any:
    """The value of a line of JSON."""
    try:
        return json_value(record.data.decode())
    except UnicodeDecodeError:
        raise Bad(record.where, "not UTF-8") from None
    except ValueError as error:
        raise Bad(record.where, f"not valid JSON ({error}); a record is one object on one line") from None


def _taken_apart(data: Mapping[str, Any], record: Record, reading: Reading, template: Template) -> list[Piece | Bad]:
    where, read = record.where, record.read

    def given(*fields: str) -> bool:
        return fields[0] in reading.kinds and all(data.get(reading.name(field)) is not None for field in fields)

    def text(field: str, *, empty: bool = False) -> str:
        return _string(data[reading.name(field)], reading.name(field), where, empty)

    if given("input_ids"):
        names = reading.name("input_ids"), reading.name("loss_mask")
        token, supervised = _ids(data[names[0]], data.get(names[1]), names, where)
        return [Piece(token, supervised, where, True, read)]
    if given("messages"):
        rendered, spans = template.render(data[reading.name("messages")], data.get(reading.name("tools")), where)
        return [Piece(_characters(rendered, reading.name("messages"), where), spans, where, True, read)]
    if given("prompt", "response"):
        prompt, response = text("prompt", empty=True), text("response")
        context = [Piece(part, False, where, False, read) for part in split([prompt])]
        parts = [*context, *joined(split([response]), True, where, read)]
        return [replace(part, follows=number > 0) for number, part in enumerate(parts)]
    if given("text"):
        return list(joined(split([text("text")]), True, where, read))
    has = ", ".join(sorted(str(key) for key, value in data.items() if value is not None)) or "nothing"
    raise Bad(where, f"needs {needed(reading)}; it has {has}")


def needed(reading: Reading) -> str:
    """The fields that a record must have, in words."""
    ways = [("text",), ("messages",), ("prompt", "response"), ("input_ids",)]
    named = [" and ".join(f'"{reading.name(field)}"' for field in way) for way in ways if way[0] in reading.kinds]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])}, or {named[-1]}"


def _string(value: Any, field: str, where: str, empty: bool) -> str:
    if not isinstance(value, str):
        raise Bad(where, f'"{field}" is {_kind(value)}, not a string')
    if not empty and not value.strip():
        raise Bad(where, f'"{field}" is empty')
    return _characters(value, field, where)


def _characters(text: str, field: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Bad(where, f'"{field}" holds half of a surrogate pair, which is no character') from None
    return text


def _ids(ids: Any, loss_mask: Any, names: tuple[str, str], where: str) -> tuple[np.ndarray, np.ndarray | bool]:
    token = _integers(ids, names[0], "iu", where)
    if len(token) == 0:
        raise Bad(where, f'"{names[0]}" is empty')
    if loss_mask is None:
        return token, True
    mask = _integers(loss_mask, names[1], "iub", where)
    if len(mask) != len(token):
        raise Bad(where, f'"{names[1]}" has {len(mask)} entries for {len(token)} tokens')
    if not np.isin(mask, (0, 1)).all():
        raise Bad(where, f'"{names[1]}" holds something other than 0 and 1')
    return token, mask.astype(bool)


def _integers(value: Any, field: str, kinds: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged lists
        array = np.empty(1, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise Bad(where, f'"{field}" is not a list of whole numbers')
    return array.astype(np.int64)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def joined(texts: Iterable[str], supervised: bool, where: str, read: int) -> Iterator[Piece]:
    """The pieces of one document, the last of them marked."""
    held: str | None = None
    follows = False
    for text in texts:
        if held is not None:
            yield Piece(held, supervised, where, False, read, follows)
            follows = True
        held = text
    if held is not None:
        yield Piece(held, supervised, where, True, read, follows)


def split(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text into pieces of at most PIECE characters, before the space between two words, where there are any.

    Tokenisers part words there, so the pieces give the tokens that the whole would, each encoded as one that `follows`.
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
