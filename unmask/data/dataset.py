"""A dataset of tokenised documents, memory-mapped from the folder that `prepare` wrote or held in memory.

The folder: tokens.bin (every document's ids, end to end, uint16 or uint32), supervised.bin (uint8 per token, only where
some token is not supervised), offsets.npy (int64 [documents + 1], where each document begins), tokenizer/ (a copy) and
manifest.json (sizes and sha256 of all of these, counts, sources).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from unmask.data import checksums
from unmask.data.arrays import mapped_npy
from unmask.data.tokenizer import fingerprint, load_tokenizer, refuse_other
from unmask.errors import UserError
from unmask.hf import vocabulary_of

TOKENS, SUPERVISED, OFFSETS, TOKENIZER, MANIFEST = (
    "tokens.bin",
    "supervised.bin",
    "offsets.npy",
    "tokenizer",
    "manifest.json",
)
VERSION = 1
#: Bytes of tokens up to which all ids are looked at when a dataset is opened, which takes a tenth of a second.
SCANNED = 1 << 28
#: Tokens looked at together.
CHUNK = 1 << 22


class File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a prepared dataset holds; `skipped` counts the bad records left out, `examples` names the first of them."""

    model_config = ConfigDict(extra="forbid")

    version: int = VERSION
    dtype: Literal["uint16", "uint32"]
    documents: int
    tokens: int
    supervised: int
    #: Ids are smaller than this; the tokeniser's size, or one more than the largest id seen where there is none.
    vocabulary: int
    #: Hash of the tokeniser's vocabulary; None for a dataset of ids alone.
    tokenizer_sha256: str | None
    #: What documents of text begin with, unsupervised.
    bos: list[int] = []
    #: Documents made from `messages`; by which chat template, and which of the assistant's turns are supervised.
    conversations: int = 0
    chat_template_sha256: str | None = None
    supervise: Literal["all", "last"] | None = None
    sources: list[str]
    skipped: int = 0
    examples: list[str] = []
    files: dict[str, File] = {}


class Dataset:
    """Documents by index. `tokens`: their total; `lengths`: int64 [documents]; `tokenizer_path`: its copy, or None."""

    def __init__(
        self,
        token: np.ndarray,
        supervised: np.ndarray | None,
        offsets: np.ndarray,
        tokenizer_path: Path | None = None,
        manifest: Manifest | None = None,
        folder: Path | None = None,
    ):
        self._token, self._supervised, self._offsets = token, supervised, offsets
        self.tokenizer_path = tokenizer_path
        self.manifest = manifest
        self.folder = folder
        self.lengths = np.diff(offsets)
        #: What the documents of text begin with; see `unmask.data.beginnings`.
        self.bos: tuple[int, ...] = () if manifest is None else tuple(manifest.bos)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return len(self._token)

    def document(self, index: int, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(token int64 [n], supervised bool [n]) of a document, or of its tokens [start, stop)."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        first, end = int(self._offsets[index]), int(self._offsets[index + 1])
        begin = min(first + start, end)
        end = end if stop is None else min(first + stop, end)
        token = self._token[begin:end].astype(np.int64)
        self._refuse_outside(token, begin)
        if self._supervised is None:
            return token, np.ones(len(token), bool)
        return token, self._supervised[begin:end].astype(bool)

    @property
    def texts(self) -> bool:
        """Whether it was made with a tokeniser, and not from conversations alone."""
        found = self.manifest
        return found is not None and found.tokenizer_sha256 is not None and found.conversations < found.documents

    def digest(self) -> str:
        """A hash of all tokens and of where a loss may be taken.

        Of a prepared dataset that of its manifest, whose checksums were compared when it was opened; files too large
        for that add a sample of their bytes.
        """
        if self._digest is None:
            self._digest = self._hash()
        return self._digest

    def _hash(self) -> str:
        if self.manifest is not None and self.folder is not None:
            total = hashlib.sha256(self.manifest.model_dump_json(include={"files"}).encode())
            for name, file in self.manifest.files.items():
                if file.bytes > checksums.WHOLE:
                    total.update(checksums.sampled(self.folder / name).encode())
            return total.hexdigest()
        total = hashlib.sha256(self.lengths.tobytes())
        for index in range(len(self)):
            for part in self.document(index):
                total.update(part.tobytes())
        return total.hexdigest()

    def check_ids(self) -> None:
        """UserError, with file and document, for an id outside of the vocabulary; reads every token."""
        for first in range(0, self.tokens, CHUNK):
            self._refuse_outside(self._token[first : first + CHUNK], first)

    def begins(self, documents: np.ndarray) -> np.ndarray:
        """Which of these documents (int [n]) begin with `bos` and go on; bool [n]."""
        found = self.lengths[documents] > len(self.bos)
        for place, index in enumerate(self.bos):
            found[found] &= self._token[self._offsets[documents[found]] + place] == index
        return found

    def learnt(self, document: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Whether a loss may be taken on parts of documents, bool [n].

        document, start: int [n], all parts of all documents, in order: each goes up to where the next one begins.
        """
        if self._supervised is None or not len(document):
            return np.ones(len(document), bool)
        return np.maximum.reduceat(self._supervised, self._offsets[document] + start).astype(bool)

    def prompted(self) -> np.ndarray:
        """Whether some token of a document, besides `bos`, is not supervised; bool [documents]."""
        if self._supervised is None or not len(self):
            return np.zeros(len(self), bool)
        first = self._offsets[:-1] + np.where(self.begins(np.arange(len(self))), len(self.bos), 0)
        ends = np.minimum.reduceat(self._supervised, np.stack([first, self._offsets[1:] - 1], 1).ravel())[::2]
        return ~(ends.astype(bool) & self._supervised[self._offsets[1:] - 1].astype(bool))

    def check_rows(self, rows: int, tokenizer: Any, where: str) -> None:
        """UserError for an id without a row in an embedding of `rows`; reads every token where there may be one."""
        known = self.manifest.vocabulary if self.manifest is not None else rows + 1
        if rows >= (known if tokenizer is None else vocabulary_of(tokenizer)):
            return
        for first in range(0, self.tokens, CHUNK):
            outside = self._token[first : first + CHUNK] >= rows
            if outside.any():
                place = first + int(np.argmax(outside))
                number = int(np.searchsorted(self._offsets, place, "right")) - 1
                advice = "" if tokenizer is None else ": use the model's own tokeniser"
                raise UserError(
                    f"{where}: document {number} holds the token id {self._token[place]} and the model has {rows} "
                    f"embeddings{advice}, or leave vocab_size out of model.config"
                )

    def learns(self, token: int, limit: int) -> int | None:
        """The first document with `token` among its supervised tokens, of the first `limit` tokens; None for none."""
        if self.manifest is not None and token >= self.manifest.vocabulary:
            return None
        for first in range(0, min(self.tokens, limit), CHUNK):
            part = slice(first, min(first + CHUNK, limit))
            found = self._token[part] == token
            found = found if self._supervised is None else found & self._supervised[part].astype(bool)
            if found.any():
                return int(np.searchsorted(self._offsets, first + int(np.argmax(found)), "right")) - 1
        return None

    def _refuse_outside(self, token: np.ndarray, first: int) -> None:
        """token: those from place `first` on."""
        if self.manifest is None or self.folder is None or token.max(initial=0) < self.manifest.vocabulary:
            return
        place = int(np.argmax(token >= self.manifest.vocabulary))
        number = int(np.searchsorted(self._offsets, first + place, "right")) - 1
        raise UserError(
            f"{self.folder / TOKENS}: damaged: document {number} holds the token id {token[place]}, outside of the "
            f"dataset's vocabulary of {self.manifest.vocabulary}; copy it again or prepare it again"
        )


def open_dataset(path: str | Path, tokenizer: Any = None, *, verify: bool = False) -> Dataset:
    """Map a prepared dataset into memory, after checking that it is whole.

    tokenizer: a tokeniser or its path that the dataset must fit (it may have more tokens, such as a mask token).
    Raises UserError for anything missing, cut short or altered, and for an id outside of the vocabulary. verify: also
    read files above `checksums.WHOLE` through; else a byte altered there is not noticed, and an id outside of the
    vocabulary only when its document is read.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    _check_files(folder, manifest)
    read = [name for name, file in manifest.files.items() if verify or file.bytes <= checksums.WHOLE]
    _check_sums(folder, manifest, [name for name in read if name != TOKENS])
    try:
        offsets = np.array(mapped_npy(folder / OFFSETS))
    except ValueError:
        raise UserError(f"{folder / OFFSETS}: damaged; copy it again or prepare the dataset again") from None
    sound = offsets.dtype == np.int64 and offsets.shape == (manifest.documents + 1,)
    if not sound or offsets[0] != 0 or offsets[-1] != manifest.tokens or not (np.diff(offsets) > 0).all():
        raise UserError(f"{folder / OFFSETS}: does not fit {MANIFEST}; prepare the dataset again")
    copy = folder / TOKENIZER if manifest.tokenizer_sha256 else None
    if tokenizer is not None and copy is not None:
        given = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        if fingerprint(given) != manifest.tokenizer_sha256:
            refuse_other(load_tokenizer(copy), given, str(folder))
    token = np.memmap(folder / TOKENS, dtype=manifest.dtype, mode="r")
    flags = np.memmap(folder / SUPERVISED, dtype=np.uint8, mode="r") if SUPERVISED in manifest.files else None
    dataset = Dataset(token, flags, offsets, copy, manifest, folder)
    if verify or token.nbytes <= SCANNED:
        dataset.check_ids()
    # Of the tokens only now: an id outside of the vocabulary tells the document.
    _check_sums(folder, manifest, [name for name in read if name == TOKENS])
    return dataset


def _read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"{folder}: no such dataset; make one with `unmask prepare`")
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder}: not a prepared dataset (no {MANIFEST}); make one with `unmask prepare`") from None
    except (ValidationError, OSError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{file}: cannot be read ({reason}); prepare the dataset again") from None
    if manifest.version != VERSION:
        raise UserError(
            f"{file}: format {manifest.version}, and this version of unmask reads {VERSION}; prepare it again"
        )
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    width = np.dtype(manifest.dtype).itemsize
    expected = {TOKENS: manifest.tokens * width, OFFSETS: None}
    if manifest.supervised < manifest.tokens:
        expected[SUPERVISED] = manifest.tokens
    for name, size in expected.items():
        if name not in manifest.files or size not in (None, manifest.files[name].bytes):
            raise UserError(f"{folder / MANIFEST}: contradicts itself about {name}; prepare the dataset again")
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing from the dataset; copy it again or prepare it again")
        size = path.stat().st_size
        if size != file.bytes:
            raise UserError(
                f"{path}: {size} bytes where {MANIFEST} says {file.bytes}; copy it again or prepare it again"
            )


def _check_sums(folder: Path, manifest: Manifest, names: list[str]) -> None:
    for name in names:
        if checksums.sha256(folder / name) != manifest.files[name].sha256:
            raise UserError(
                f"{folder / name}: altered since it was written (checksum differs); copy it again or prepare it again"
            )
