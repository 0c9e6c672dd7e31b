"""A corpus every Python has: the source of its own standard library, split into training and held-out files.

The split is a hash of each file's name relative to the library, so it is the same on every machine with this Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from unmask.errors import UserError

#: Tests, other people's packages, and generated files: tables of character codes and one of help texts.
EXCLUDED = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ encodings pydoc_data turtledemo".split()
)


def stdlib_files(held_out: float = 0.05) -> tuple[list[Path], list[Path]]:
    """The (training, held-out) source files of the running Python's standard library, in order of their names.

    held_out: the fraction of the files that is held out, to the accuracy of a hash.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED.isdisjoint(name.parts) and path.stat().st_size:
            share = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big") / 2**32
            parts[share < held_out].append(path)
    if not parts[0]:
        raise UserError(f"{root}: this Python has no source files of its standard library; name a text folder instead")
    return parts
