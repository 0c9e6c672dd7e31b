"""Whether files are what they were: SHA-256 of all of a file, or of a sample where all of it would take too long."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

#: Bytes up to which the whole of a file is read, at about 1 GB/s; of a larger one, PARTS parts of PART bytes.
WHOLE = 1 << 30
PART, PARTS = 1 << 16, 1 << 10


def sha256(path: Path) -> str:
    """Of the whole file; read once as long as its size, time and inode stay what they were."""
    return _sum(path.absolute(), *_identity(path), 0)


def sampled(path: Path) -> str:
    """Of PARTS parts spread evenly over the file, its beginning and its end among them."""
    return _sum(path.absolute(), *_identity(path), PARTS)


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


@lru_cache(maxsize=256)
def _sum(path: Path, size: int, time: int, inode: int, parts: int) -> str:
    with open(path, "rb") as file:
        if not parts:
            return hashlib.file_digest(file, "sha256").hexdigest()
        total = hashlib.sha256(str(size).encode())
        for number in range(parts):
            file.seek(max(0, size - PART) * number // max(1, parts - 1))
            total.update(file.read(PART))
        return total.hexdigest()
