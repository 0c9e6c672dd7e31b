"""The one exception a user is meant to read: what is wrong, where, and what to do."""

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


def as_path(value: Any, what: str) -> Path:
    """`value` as a Path; UserError, naming `what` it should be the path of, for anything that is none."""
    if not isinstance(value, str | PathLike):
        raise UserError(f"the path of {what} is text or a pathlib.Path, not {value!r}")
    return Path(value)
