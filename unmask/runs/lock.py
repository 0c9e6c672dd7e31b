"""One run at a time in a folder: two would take turns at deleting each other's log and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unmask.errors import UserError


@contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """Hold the run's folder; UserError when another process does. The lock goes with its process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on this operating system
        yield
        return
    try:
        run.mkdir(parents=True, exist_ok=True)
        folder = os.open(run, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"checkpoint.path={run}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"checkpoint.path={run}: another process is training in this folder; wait for it, or name another"
            ) from None
        yield
    finally:
        os.close(folder)
