"""The recipes: configs of the commonest jobs, each a commented YAML file beside this one.

`unmask recipes` lists them, `unmask recipes NAME > run.yaml` makes one yours.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from unmask.errors import UserError
from unmask.registry import nearest


def names() -> list[str]:
    """Every recipe, in alphabetical order."""
    entries = (entry.name for entry in files(__package__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML of a recipe, comments and all; UserError for a name that is none."""
    known = names()
    if name not in known:
        raise UserError(f"unknown recipe {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return (files(__package__) / f"{name}.yaml").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """What a recipe is for: the first line of its file."""
    return text(name).splitlines()[0].removeprefix("# ")


def write(name: str, path: Path, *, force: bool = False) -> None:
    """Write a recipe to a file; UserError where one is already, unless `force`."""
    recipe = text(name)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name the file to write")
    if path.exists() and not force:
        raise UserError(f"{path}: is there already; name another file, or overwrite it with --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe, encoding="utf-8")
