"""The one exception a user is meant to read: what is wrong, where, and what to do."""

import re
from os import PathLike
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Bad input, told in one sentence. The command line prints it and exits with code 2.

    told: of several processes, whether another one tells it to the user; None where that is not agreed.
    """

    def __init__(self, message: str = "", *, told: bool | None = None):
        super().__init__(message)
        self.told = told


class RankLost(UserError):
    """Another process of the run is gone or silent: a new start from the last checkpoint may well work."""


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as in "1 document" and "2,000 documents": more than one takes an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_path(value: Any, what: str) -> Path:
    """`value` as a Path; UserError, naming `what` it should be the path of, for anything that is none."""
    if not isinstance(value, str | PathLike):
        raise UserError(f"the path of {what} is text or a pathlib.Path, not {value!r}")
    return Path(value)


def disk_refusal(error: BaseException) -> str | None:
    """Why the disk did not take a write, or None where `error` tells of something else.

    Libraries in Rust and C++ raise exceptions of their own: safetensors and tokenizers with the system's words in
    theirs, torch's archive writer with the place up to which it came.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if found := re.search(r"([A-Z][^:()]*) \(os error \d+\)", str(error)):
        return found[1]
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
        return "the disk took a part of it only: it is full, or files may not be so large"
    return None
