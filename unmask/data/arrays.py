"""Token ids that another program has written: .npy arrays, raw .bin files, and Megatron-LM's .bin/.idx pairs.

A Megatron index (megatron/core/datasets/indexed_dataset.py, version 1), little-endian: "MMIDIDX\\0\\0", uint64 version,
uint8 code of the ids' type, uint64 sequences S, uint64 entries D of the document index, int32 [S] tokens of each
sequence, int64 [S] its first byte in the .bin file, int64 [D] the first sequence of each document and, last, S.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from unmask.data.reading import Reading
from unmask.data.records import PIECE, Piece
from unmask.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
NPY = b"\x93NUMPY"
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
#: Types that ids are not of: float64 and float32.
FLOATS = (6, 7)


def read_npy(path: Path, reading: Reading, done: int) -> Iterator[Piece]:
    """A 1-D array is a document, a row of a 2-D one is; either is cut where `reading.end_id` stands."""
    with path.open("rb") as file:
        if file.read(len(NPY)) != NPY:
            raise UserError(f"{path}: not a whole .npy array (it begins otherwise); copy it again")
    try:
        array = mapped_npy(path)
    except ValueError:
        raise UserError(
            f"{path}: not a whole .npy array of numbers; copy it again, or write it anew with numpy.save"
        ) from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise UserError(
            f"{path}: {array.ndim}-dimensional {array.dtype}: token ids are whole numbers in one or two dimensions"
        )
    yield from _documents([array] if array.ndim == 1 else array, reading.end_id, path, done)


def mapped_npy(path: Path) -> np.ndarray:
    """A .npy array, mapped into memory; ValueError for a file that is none, is cut short, or holds objects."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        if error.filename is not None:  # the file, not what its header makes numpy do
            raise
        raise ValueError(str(error)) from None
    except Exception as error:  # its header is Python source, read by several modules of the standard library
        raise ValueError(f"{type(error).__name__}: {error}") from None


def read_bin(path: Path, reading: Reading, done: int) -> Iterator[Piece]:
    """Ids of `reading.dtype`, little-endian, without a header."""
    if reading.dtype is None:
        raise UserError(
            f"{path}: the type of these ids is not known: give `unmask prepare --dtype uint16` (dtype=...), or the "
            ".idx file of a Megatron pair beside it"
        )
    dtype = np.dtype(reading.dtype).newbyteorder("<")
    array = _mapped(path, dtype, path.stat().st_size)
    yield from _documents([array], reading.end_id, path, done)


def read_megatron(path: Path, reading: Reading, done: int) -> Iterator[Piece]:
    """The documents of a pair; path: of its index."""
    if reading.end_id is not None:
        raise UserError(f"{path}: its index says where documents end: leave --end-id (end_id) out")
    data = path.with_suffix(".bin")
    dtype, offsets = read_index(path)
    if not data.is_file():
        raise UserError(f"{data}: missing beside {path.name}; a Megatron dataset is the two together")
    size = data.stat().st_size
    if size != offsets[-1] * dtype.itemsize:
        raise UserError(
            f"{data}: {size} bytes where {path.name} describes {offsets[-1] * dtype.itemsize}; copy both again"
        )
    array = _mapped(data, dtype, size)
    parts = (array[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True))
    yield from _documents(parts, None, path, done + path.stat().st_size)


def read_index(path: Path) -> tuple[np.dtype, np.ndarray]:
    """(type of the ids, where each document begins and the last one ends in tokens: int64 [documents + 1])."""
    size = path.stat().st_size
    head = path.open("rb").read(HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path}: not the index of a Megatron dataset (it begins otherwise)")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{path}: a Megatron index of version {version}, and version 1 is read")
    if code not in TYPES:
        what = "floating-point numbers, no token ids" if code in FLOATS else f"of an unknown type ({code})"
        raise UserError(f"{path}: its entries are {what}")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size == expected + sequences and sequences:
        raise UserError(f"{path}: of several modalities; only text is read")
    if size != expected:
        raise UserError(f"{path}: {size} bytes where its header describes {expected}; copy it again")
    dtype = np.dtype(TYPES[code])
    body = np.memmap(path, np.uint8, "r", HEADER.size) if expected > HEADER.size else np.empty(0, np.uint8)
    parts = np.split(body, [4 * sequences, 12 * sequences])
    length, pointer, document = (part.view(kind) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True))
    bounds = np.r_[0, np.cumsum(length, dtype=np.int64)]
    if (length < 0).any() or not np.array_equal(pointer, bounds[:-1] * dtype.itemsize):
        raise UserError(f"{path}: damaged: its sequences do not follow one another; copy it again")
    rising = len(document) and document[0] == 0 and document[-1] == sequences and (np.diff(document) >= 0).all()
    if not rising:
        raise UserError(f"{path}: damaged: its documents do not follow one another; copy it again")
    return dtype, bounds[document]


def _mapped(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    if size % dtype.itemsize:
        raise UserError(f"{path}: {size} bytes are no whole number of {dtype.name}: cut short, or of another type")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def _documents(arrays: Iterable[np.ndarray], end_id: int | None, path: Path, done: int) -> Iterator[Piece]:
    """Each array as a document, or as several that end with `end_id`; in pieces of bounded length."""
    number, read = 0, done
    for array in arrays:
        for first in range(0, len(array), PIECE):
            chunk = np.asarray(array[first : first + PIECE])
            ends = [] if end_id is None else (np.flatnonzero(chunk == end_id) + 1).tolist()
            closed = bool(ends) and ends[-1] == len(chunk)
            begin = 0
            for stop in ends if closed else [*ends, len(chunk)]:
                last = stop < len(chunk) or closed or first + PIECE >= len(array)
                read += (stop - begin) * chunk.itemsize
                yield Piece(chunk[begin:stop], True, f"{path}, document {number}", last, read)
                begin, number = stop, number + last
