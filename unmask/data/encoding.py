"""From batches of items to tokens: records taken apart, texts tokenised, bad ones named. Pure, so it runs anywhere."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from unmask.data.beginnings import beginning, begun
from unmask.data.chat import Chat, NoTemplate, chat_of
from unmask.data.reading import Reading
from unmask.data.records import Bad, Item, Piece, Record, Spans, pieces_of, split
from unmask.errors import UserError
from unmask.hf import vocabulary_of

#: Items encoded in one call, in parallel, unless they reach so many characters before.
BATCH = 1024
CHARACTERS = 1 << 20
LARGEST = 1 << 32
UNCLOSED = "the tokeniser has no end-of-text token to close documents with; use `unmask prepare --no-eos` (eos=False)"
ACROSS = (
    "the tokeniser joins the end of a prompt and the beginning of an answer in one token: mark the assistant's part "
    "with {% generation %} in a chat template of your own (`unmask prepare --chat-template FILE`)"
)


class Encoder:
    """A tokeniser as data preparation needs it; can be sent to another process.

    tokenizer: a transformers tokeniser, or None for ids alone; eos: documents are to be closed with its end token.
    """

    def __init__(self, tokenizer: Any, eos: bool):
        self._slow: Any = None
        self._backend: Any = None
        self._placing: Any = None
        self.mask_text: str | None = None
        self.end: int | None = None
        #: Whether documents of text lack the end token that they are to be closed with.
        self.unclosed = False
        self.mask: int | None = None
        self.vocabulary: int | None = None
        self.dtype: Literal["uint16", "uint32"] = "uint32"
        if tokenizer is None:
            return
        if getattr(tokenizer, "is_fast", False):
            self._backend = tokenizer.backend_tokenizer
            self._backend.no_truncation()
            self._backend.no_padding()
        else:
            self._slow = tokenizer
        self.mask = getattr(tokenizer, "mask_token_id", None)
        self.mask_text = tokenizer.mask_token if self.mask is not None else None
        self.vocabulary = vocabulary_of(tokenizer)
        self.dtype = "uint16" if self.vocabulary <= 1 << 16 else "uint32"
        self.end = tokenizer.eos_token_id if eos else None
        self.unclosed = eos and self.end is None

    def encode(self, texts: list[str], follows: Sequence[bool] = ()) -> list[np.ndarray]:
        """Ids of each text, without special tokens around them. follows: which of them go on with a text.

        Special tokens written out in a text count as such, unless the mask token is among them: only noise may place
        that one, so such a text (this package's own source, say) is read as plain characters throughout.
        """
        joint, ids = next(iter(self._joints)) if any(follows) else ("", [])
        marked = [joint + text if joint and follows[number] else text for number, text in enumerate(texts)]
        coded: list[np.ndarray] = []
        for group in _groups([len(text) for text in marked]):
            coded += self._encode(marked[group])
        for number in np.flatnonzero(follows) if joint else ():
            part = coded[number]
            coded[number] = part[len(ids) :] if begun(part, ids) else self._following(texts[number])
        return coded

    def _following(self, text: str) -> np.ndarray:
        """The ids of a text that goes on with another, and whose beginning may join what is put in front of it."""
        for joint, ids in self._joints:
            coded = self._encode([joint + text])[0]
            if begun(coded, ids):
                return coded[len(ids) :]
        return self._encode([text])[0]

    @cached_property
    def _joints(self) -> list[tuple[str, list[int]]]:
        """Characters to put in front of a text that goes on, with their ids, which are taken off again.

        Many a tokeniser puts a space before a text, and so before such a character instead. ("", []) where a text has
        the same ids after another as by itself.
        """
        nothing: list[tuple[str, list[int]]] = [("", [])]
        try:
            one, both, near, far = (ids.tolist() for ids in self._encode(["a", "a b", "b", " b"]))
            joints = []
            for joint in ("\n", ".", "a"):
                ids, close, apart = (ids.tolist() for ids in self._encode([joint, f"{joint}b", f"{joint} b"]))
                own, tail = close[len(ids) :], apart[len(ids) :]
                fits = ids and own and begun(close, ids) and begun(apart, ids) and begun(both, one)
                if fits and tail == both[len(one) :] and (own, tail) != (near, far):
                    joints.append((joint, ids))
        except Exception:  # a vocabulary without these letters, and without a token for what is unknown
            return nothing
        return joints or nothing

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self._slow is not None:
            slow = self._slow(texts, add_special_tokens=False, verbose=False)["input_ids"]
            return [np.asarray(ids, np.int64) for ids in slow]
        if self._backend is None:
            raise UserError("text needs a tokeniser; only records of `input_ids` do without one")
        plain = [self.mask_text is not None and self.mask_text in text for text in texts]
        coded: list[Any] = [None] * len(texts)
        for literal in set(plain):
            chosen = [i for i, is_plain in enumerate(plain) if is_plain == literal]
            self._backend.encode_special_tokens = literal
            encodings = self._backend.encode_batch_fast([texts[i] for i in chosen], add_special_tokens=False)
            for i, encoding in zip(chosen, encodings, strict=True):
                coded[i] = np.array(encoding.ids, np.uint32)
        self._backend.encode_special_tokens = False
        return coded

    def encode_placed(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, [first character, end] of each token: int64 [n, 2]) of each text; special tokens count as such."""
        if self._backend is None:
            raise UserError("messages need a tokeniser of the fast kind (tokenizer.json), which knows where tokens lie")
        if self._placing is None:
            # Without the part that only trims spaces off the places of tokens, special tokens being left out.
            self._placing = copy.deepcopy(self._backend)
            self._placing.post_processor = None
        pieces = [(number, *piece) for number, text in enumerate(texts) for piece in _pieces(text)]
        joint, ids = self._joints[0] if any(at for _, at, _ in pieces) else ("", [])
        found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in texts]
        for group in _groups([len(part) for *_, part in pieces]):
            marked = [joint + part if at else part for _, at, part in pieces[group]]
            encodings = self._placing.encode_batch(marked, add_special_tokens=False)
            for (number, at, part), encoding in zip(pieces[group], encodings, strict=True):
                skip, before = (len(ids), len(joint)) if at else (0, 0)
                if skip and not begun(encoding.ids, ids):  # joined to what was put in front
                    encoding, skip, before = self._placing.encode(part, add_special_tokens=False), 0, 0
                place = np.array(encoding.offsets[skip:], np.int64).reshape(-1, 2) + (at - before)
                found[number].append((np.array(encoding.ids[skip:], np.uint32), place))
        empty = (np.empty(0, np.uint32), np.empty((0, 2), np.int64))
        return [
            (np.concatenate([ids for ids, _ in parts]), np.concatenate([place for _, place in parts]))
            for parts in (parts or [empty] for parts in found)
        ]

    def fault(self, token: np.ndarray, *, given: bool) -> str | None:
        """What makes these ids unusable, or None. given: they are the user's, not the tokeniser's."""
        if given and token.min(initial=0) < 0:
            return f"{token.min()} is no token id"
        if given and token.max(initial=0) >= (self.vocabulary or LARGEST):
            limit = f"the tokeniser's vocabulary of {self.vocabulary}" if self.vocabulary else "what a dataset can hold"
            return f"token id {token.max()} is outside {limit}"
        if self.mask is not None and (token == self.mask).any():
            return f"contains the mask token {self.mask_text!r}, which only noise may place"
        return None


class Fragment(NamedTuple):
    """What a batch holds of one document: so many tokens, whether it ends there, why it cannot be used if it cannot.

    kind: "text" is what an end token closes, unlike a "conversation", which ends as its template says, and "ids".
    """

    tokens: int
    last: bool
    bad: Bad | None = None
    kind: Literal["text", "conversation", "ids"] = "ids"


@dataclass(frozen=True)
class Coded:
    """A batch as tokens, end to end. supervised: uint8 a token, None where all are; read: bytes of the sources."""

    token: np.ndarray
    supervised: np.ndarray | None
    fragments: list[Fragment]
    read: int


class Coder:
    """Batches of items to tokens; a function, but for its settings, and can be sent to another process."""

    def __init__(self, tokenizer: Any, reading: Reading):
        self.encoder = Encoder(tokenizer, reading.eos)
        #: What documents of text begin with.
        self.begin = beginning(tokenizer)
        self.chat: Chat | None = chat_of(tokenizer, reading.supervise)
        self._reading = reading

    def __call__(self, batch: list[Item]) -> Coded:
        """The batch's documents, in order. Raises UserError for a mistake that is not of one record."""
        pieces: list[Piece | Bad] = []
        for item in batch:
            if isinstance(item, Record):
                pieces += pieces_of(item, self._reading, self.chat or NoTemplate())
            else:
                pieces.append(item)
        read = max((item.read for item in batch if not isinstance(item, Bad)), default=0)
        fragments: list[Fragment] = []
        parts: list[tuple[np.ndarray, Any]] = []
        for fragment, own in self._documents(pieces):
            fragments.append(fragment)
            parts += own
        return Coded(*_laid_together(parts, self.encoder.dtype), fragments, read)

    def _documents(self, pieces: list[Piece | Bad]) -> Iterator[tuple[Fragment, list[tuple[np.ndarray, Any]]]]:
        """Each document's part of the batch: a fragment, its tokens and which of them are supervised."""
        coded, end = self._coded(pieces), self.encoder.end
        parts: list[tuple[np.ndarray, Any]] = []
        bad: Bad | None = None
        for number, piece in enumerate(pieces):
            if isinstance(piece, Bad):
                yield Fragment(0, True, piece), []
                continue
            ids, flags = coded[number]
            if bad is None and isinstance(ids, Bad):
                bad = ids
            elif bad is None and (what := self.encoder.fault(ids, given=not _is_text(piece))):
                bad = Bad(piece.where, what)
            parts.append((ids, flags))
            kind: Literal["text", "conversation", "ids"] = "text" if _is_text(piece) else "ids"
            kind = "conversation" if isinstance(piece.supervised, Spans) else kind
            if bad is None and kind == "text" and self.encoder.unclosed:
                bad = Bad(piece.where, UNCLOSED, setting=True)
            if kind == "text" and not piece.follows and self.begin and not isinstance(ids, Bad):
                self._begin(parts)
            if piece.last and end is not None and kind == "text":
                parts.append((np.array([end]), True))
            if piece.last or number + 1 == len(pieces):
                kept = [] if bad else parts
                yield Fragment(sum(len(ids) for ids, _ in kept), piece.last, bad, kind), kept
                parts, bad = [], None

    def _begin(self, parts: list[tuple[np.ndarray, Any]]) -> None:
        """Put in front of a document what it begins with, unless its text says it; either way it is not learnt."""
        (ids, flags), size = parts[0], len(self.begin)
        if begun(ids, self.begin):
            parts[:1] = [(ids[:size], False), (ids[size:], flags)]
        else:
            parts.insert(0, (np.array(self.begin), False))

    def _coded(self, pieces: list[Piece | Bad]) -> dict[int, tuple[Any, Any]]:
        """By number: the ids of each piece (or the Bad that they are), and which of them are supervised."""
        whole = {number: piece for number, piece in enumerate(pieces) if isinstance(piece, Piece)}
        chats = {number: piece for number, piece in whole.items() if isinstance(piece.supervised, Spans)}
        texts = {number: piece for number, piece in whole.items() if number not in chats and _is_text(piece)}
        found: dict[int, tuple[Any, Any]] = {
            number: (piece.content, piece.supervised)
            for number, piece in whole.items()
            if number not in chats and number not in texts
        }
        try:
            coded = self.encoder.encode(
                [str(piece.content) for piece in texts.values()], [piece.follows for piece in texts.values()]
            )
            found |= {number: (ids, texts[number].supervised) for number, ids in zip(texts, coded, strict=True)}
        except UserError as error:  # told when it is this document's turn: an earlier one may be bad
            found |= {number: (Bad(piece.where, str(error), setting=True), True) for number, piece in texts.items()}
        try:
            placed = self.encoder.encode_placed([str(piece.content) for piece in chats.values()]) if chats else []
            found |= {number: _supervised(chats[number], *its) for number, its in zip(chats, placed, strict=True)}
        except UserError as error:
            found |= {number: (Bad(piece.where, str(error), setting=True), True) for number, piece in chats.items()}
        return found


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items in batches of bounded size, whatever works on them."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += 0 if isinstance(item, Bad) else item.size
        if len(batch) >= BATCH or size >= CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """(where it begins, the piece) of the pieces that a text is encoded in."""
    at = 0
    for part in split([text]):
        yield at, part
        at += len(part)


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours that have CHARACTERS together, or few more: what is encoded at once bounds the memory."""
    first = total = 0
    for number, size in enumerate(sizes):
        total += size
        if total >= CHARACTERS or number + 1 == len(sizes):
            yield slice(first, number + 1)
            first, total = number + 1, 0


def _is_text(piece: Piece) -> bool:
    return isinstance(piece.content, str)


def _supervised(piece: Piece, ids: np.ndarray, place: np.ndarray) -> tuple[Any, np.ndarray]:
    """The ids of a conversation (or the Bad that it is), and which of them lie in its stretches."""
    assert isinstance(piece.supervised, Spans)
    start, stop = place.T
    flags, across = np.zeros(len(ids), bool), False
    for first, end in piece.supervised.stretches:
        low, high = np.searchsorted(stop, first, "right"), np.searchsorted(start, end, "left")
        flags[low:high] = True
        across = across or bool(low < high and (start[low] < first or stop[high - 1] > end))
    if across and piece.supervised.exact:
        return Bad(piece.where, ACROSS), flags
    if not flags.any():
        return Bad(piece.where, "the chat template leaves nothing of the assistant's turns to learn from"), flags
    return ids, flags


def _laid_together(
    parts: list[tuple[np.ndarray, bool | np.ndarray]], dtype: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens end to end, and their flags where one is not supervised."""
    token = np.concatenate([ids.astype(dtype, copy=False) for ids, _ in parts]) if parts else np.empty(0, dtype)
    if all(flags is True for _, flags in parts):
        return token, None
    return token, np.concatenate([np.broadcast_to(np.asarray(flags, np.uint8), ids.shape) for ids, flags in parts])
