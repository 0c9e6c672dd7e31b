"""Named implementations that third parties can extend without touching this package.

A registry is a table of `name -> "module:attribute"`. Built-in rows are written where the registry is made;
others come from the installed entry points of group `unmask.<kind>s`, or of `group`. Nothing is imported before it is
asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from unmask.errors import UserError


def nearest(name: str, known: list[str]) -> str:
    """A hint for a mistyped name: " (did you mean 'x'?)", or "" when nothing is close."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@cache
def _installed(read: Callable[..., Iterable[Any]], group: str) -> tuple[Any, ...]:
    """The entry points of a group, read once: each reading opens a file of every package."""
    return tuple(read(group=group))


class Registry:
    """Implementations of one kind ("objective", "sampler", ...), found by name and imported on first use."""

    def __init__(self, kind: str, builtin: dict[str, str], group: str | None = None):
        self.kind = kind
        self.group = group or f"unmask.{kind}s"
        self._builtin = builtin
        self._added: dict[str, Any] = {}

    def add(self, name: str, implementation: Any) -> None:
        """Register an implementation from a running program (a notebook, a test)."""
        self._added[name] = implementation

    def names(self) -> list[str]:
        return sorted({*self._builtin, *self._added, *(point.name for point in self._entry_points())})

    def __getitem__(self, name: str) -> Any:
        if name in self._added:
            return self._added[name]
        if name in self._builtin:
            module, attribute = self._builtin[name].split(":")
            return getattr(import_module(module), attribute)
        for point in self._entry_points():
            if point.name == name:
                return point.load()
        known = self.names()
        raise UserError(f"unknown {self.kind} {name!r}{nearest(name, known)}; known: {', '.join(known)}")

    def _entry_points(self) -> Any:
        return _installed(entry_points, self.group)
