"""Coded batches into two binary files: every document's ids end to end, and where a loss may be taken."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from unmask.data.encoding import Coded
from unmask.data.records import Bad
from unmask.errors import UserError

#: How many bad records are named.
EXAMPLES = 5
CHUNK = 1 << 20


@dataclass
class Tally:
    documents: int = 0
    #: Of the documents, those made from `messages`, and those that an end token can close.
    conversations: int = 0
    texts: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)


class Storage:
    """Appends documents to two binary files, on disk or io.BytesIO: ids of `dtype`, and uint8 supervision flags.

    Nothing is written to the second before a token comes that is not supervised.
    """

    def __init__(self, token_file: BinaryIO, flag_file: BinaryIO, dtype: str):
        self._token_file, self._flag_file = token_file, flag_file
        self._dtype = np.dtype(dtype)
        self._at = self._flagged = 0
        #: Where each complete document begins, and where the last one ends.
        self.offsets = array("q", [0])
        self.supervised = 0
        self.largest = -1
        #: Whether some token is not supervised.
        self.partial = False

    def add(self, token: np.ndarray, supervised: np.ndarray | None) -> None:
        """Append to the document at hand; supervised: uint8 for each token, None for all of it."""
        if supervised is not None and not self.partial and not supervised.all():
            self.partial = True
            for first in range(0, self._at, CHUNK):
                self._flag_file.write(b"\1" * min(CHUNK, self._at - first))
        self._token_file.write(token.astype(self._dtype, copy=False).tobytes())
        if self.partial:
            self._flag_file.write(b"\1" * len(token) if supervised is None else supervised.tobytes())
        self._at += len(token)
        self._flagged += len(token) if supervised is None else int(supervised.sum(dtype=np.int64))
        self.largest = max(self.largest, int(token.max(initial=0)))

    def end(self) -> None:
        """The document at hand is complete."""
        if self._at > self.offsets[-1]:
            self.offsets.append(self._at)
        self.supervised += self._flagged
        self._flagged = 0

    def drop(self) -> None:
        """Forget the document at hand."""
        self._at, self._flagged = self.offsets[-1], 0
        for file, width in ((self._token_file, self._dtype.itemsize), (self._flag_file, int(self.partial))):
            file.seek(self._at * width)
            file.truncate()


def store(
    coded: Iterable[Coded],
    storage: Storage,
    refuse: Callable[[Bad], None],
    progress: Callable[[int, int], None] | None = None,
) -> Tally:
    """Everything into storage. `refuse` is shown every bad record, and raises or lets it be skipped.

    Raises UserError for a record that lacks a setting. progress(bytes read, documents) is called after each batch.
    """
    tally = Tally()
    dropping = False
    for batch in coded:
        at = 0
        for tokens, last, bad, kind in batch.fragments:
            if bad is not None and not dropping:
                if bad.setting:
                    raise UserError(str(bad))
                refuse(bad)
                storage.drop()
                tally.skipped += 1
                if len(tally.examples) < EXAMPLES:
                    tally.examples.append(str(bad))
                dropping = True
            if not dropping:
                own = slice(at, at + tokens)
                storage.add(batch.token[own], None if batch.supervised is None else batch.supervised[own])
                if last:
                    storage.end()
                    tally.documents += 1
                    tally.conversations += kind == "conversation"
                    tally.texts += kind == "text"
            at += tokens
            dropping = dropping and not last
        if progress is not None:
            progress(batch.read, tally.documents)
    return tally
