"""The standard library's source: deterministic, disjoint, and free of tests and of other people's packages."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from unmask.demo.corpus import stdlib_files


def test_the_split_is_disjoint_and_follows_the_names() -> None:
    train, held_out = stdlib_files()
    assert (train, held_out) == stdlib_files()
    assert not set(train) & set(held_out)
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.09
    root = Path(sysconfig.get_path("stdlib"))
    for part, paths in enumerate((train, held_out)):
        for path in paths:
            first = hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()[:8]
            assert (int(first, 16) < 0.05 * 2**32) == bool(part)
    assert {"argparse.py", "json/decoder.py"} <= {path.relative_to(root).as_posix() for path in train + held_out}


def test_what_is_left_out() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = {part for paths in stdlib_files() for path in paths for part in path.relative_to(root).parts}
    assert not names & {"test", "tests", "site-packages", "dist-packages", "encodings", "__pycache__"}
