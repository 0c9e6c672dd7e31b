"""From a stream of pieces to a stream of tokens in storage: batched tokenisation, end tokens, bad records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import numpy as np

from unmask.data.sources import Bad, Piece
from unmask.errors import UserError

#: Pieces encoded in one call, in parallel, unless they reach so many characters before.
BATCH = 1024
CHARACTERS = 1 << 20
EXAMPLES = 5
LARGEST = 1 << 32


@dataclass
class Tally:
    documents: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)


class Encoder:
    """A tokeniser as data preparation needs it. tokenizer: a transformers tokeniser, or None for ids alone."""

    def __init__(self, tokenizer: Any, eos: bool):
        self._tokenizer = tokenizer
        self.end: int | None = None
        self.mask: int | None = None
        self.vocabulary: int | None = None
        self.dtype: Literal["uint16", "uint32"] = "uint32"
        if tokenizer is not None:
            self.mask = getattr(tokenizer, "mask_token_id", None)
            self.vocabulary = 1 + max(tokenizer.get_vocab().values())
            self.dtype = "uint16" if self.vocabulary <= 1 << 16 else "uint32"
            if eos:
                self.end = tokenizer.eos_token_id
                if self.end is None:
                    raise UserError(
                        "the tokeniser has no end-of-text token to close documents with; use --no-eos (eos=False)"
                    )

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, without special tokens around them.

        Special tokens written out in a text count as such, unless the mask token is among them: only noise may place
        that one, so such a text (this package's own source, say) is read as plain characters throughout.
        """
        if not texts:
            return []
        if self._tokenizer is None:
            raise UserError("text needs a tokeniser; only records of `input_ids` do without one")
        if not getattr(self._tokenizer, "is_fast", False):
            slow = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            return [np.asarray(ids, np.int64) for ids in slow]
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        name = self._tokenizer.mask_token if self.mask is not None else None
        plain = [name is not None and name in text for text in texts]
        coded: list[Any] = [None] * len(texts)
        for literal in set(plain):
            chosen = [i for i, is_plain in enumerate(plain) if is_plain == literal]
            backend.encode_special_tokens = literal
            for i, encoding in zip(
                chosen, backend.encode_batch_fast([texts[i] for i in chosen], add_special_tokens=False), strict=True
            ):
                coded[i] = np.asarray(encoding.ids, np.int64)
        backend.encode_special_tokens = False
        return coded

    def fault(self, token: np.ndarray) -> str | None:
        """What makes these ids unusable, or None."""
        if token.max(initial=0) >= (self.vocabulary or LARGEST):
            limit = f"the tokeniser's vocabulary of {self.vocabulary}" if self.vocabulary else "what a dataset can hold"
            return f"token id {token.max()} is outside {limit}"
        if self.mask is not None and (token == self.mask).any():
            return f"contains the mask token {self._tokenizer.mask_token!r}, which only noise may place"
        return None


class Storage:
    """Appends documents to two binary files, on disk or io.BytesIO: ids of `dtype`, and uint8 supervision flags."""

    def __init__(self, token_file: BinaryIO, flag_file: BinaryIO, dtype: str):
        self._token_file, self._flag_file = token_file, flag_file
        self._dtype = np.dtype(dtype)
        self._at = self._flagged = 0
        #: Where each complete document begins, and where the last one ends.
        self.offsets = [0]
        self.supervised = 0
        self.largest = -1

    def add(self, token: np.ndarray, supervised: bool | np.ndarray) -> None:
        """Append to the document at hand; `supervised` for all of it or for each token."""
        flags = np.broadcast_to(np.asarray(supervised, np.uint8), token.shape)
        self._token_file.write(token.astype(self._dtype).tobytes())
        self._flag_file.write(flags.tobytes())
        self._at += len(token)
        self._flagged += int(flags.sum())
        self.largest = max(self.largest, int(token.max(initial=-1)))

    def end(self) -> None:
        """The document at hand is complete."""
        if self._at > self.offsets[-1]:
            self.offsets.append(self._at)
        self.supervised += self._flagged
        self._flagged = 0

    def drop(self) -> None:
        """Forget the document at hand."""
        self._at, self._flagged = self.offsets[-1], 0
        for file, width in ((self._token_file, self._dtype.itemsize), (self._flag_file, 1)):
            file.seek(self._at * width)
            file.truncate()


def store(
    items: Iterable[Piece | Bad],
    encoder: Encoder,
    storage: Storage,
    refuse: Callable[[Bad], None],
    progress: Callable[[int, int], None] | None = None,
) -> Tally:
    """Encode everything into storage. `refuse` is shown every bad record, and raises or lets it be skipped.

    progress(bytes read, documents) is called after each batch.
    """
    tally = Tally()
    dropping = False

    def refused(bad: Bad) -> None:
        refuse(bad)
        tally.skipped += 1
        if len(tally.examples) < EXAMPLES:
            tally.examples.append(str(bad))

    for batch in _batches(items):
        texts = [item.content for item in batch if isinstance(item, Piece) and isinstance(item.content, str)]
        coded = iter(encoder.encode(texts))
        for item in batch:
            if isinstance(item, Bad):
                refused(item)
                continue
            token = next(coded) if isinstance(item.content, str) else item.content
            fault = None if dropping else encoder.fault(token)
            if fault is not None:
                storage.drop()
                refused(Bad(item.where, fault))
                dropping = True
            if not dropping:
                storage.add(token, item.supervised)
                if item.last:
                    if encoder.end is not None and isinstance(item.content, str):
                        storage.add(np.array([encoder.end]), True)
                    storage.end()
                    tally.documents += 1
            dropping = dropping and not item.last
        if progress is not None:
            read = max((item.read for item in batch if isinstance(item, Piece)), default=0)
            progress(read, tally.documents)
    return tally


def _batches(items: Iterable[Piece | Bad]) -> Iterator[list[Piece | Bad]]:
    batch: list[Piece | Bad] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.content) if isinstance(item, Piece) else 0
        if len(batch) >= BATCH or size >= CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
