"""Files of ours and of others: JSON that is read, files and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.parsing import check_characters, json_value

#: What some editors begin a UTF-8 file with.
BOM = b"\xef\xbb\xbf"
#: Levels of lists and objects in a JSON file; deeper ones exhaust the stack of whoever walks through them.
DEPTH = 64


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for a text that is none, or whose lists and objects lie too deep."""
    value = json_value(text)
    level: list[Any] = [[value]]
    for _ in range(DEPTH + 2):
        inside = (inner for each in level for inner in (each.values() if isinstance(each, dict) else each))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} deep")


def read_json(path: Path, hint: str = "") -> dict[str, Any]:
    """The object in a JSON file; UserError where it cannot be read, or holds no object. hint: what to do then."""
    end = f"; {hint}" if hint else ""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as JSON: {reason}{end}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object{end}")
    return found


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:line", text) of every line of a UTF-8 file that is not blank; UserError where one cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(content.removeprefix(BOM).split(b"\n"), start=1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise UserError(f"{path}:{number}: not UTF-8 text") from None
        if text.strip():
            yield f"{path}:{number}", text


def json_line(text: str, where: str) -> Any:
    """The value of a line of JSONL; UserError, which says where, for a line that is none."""
    try:
        value = json_value(text)
        check_characters(json.dumps(value, ensure_ascii=False))
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}); a record is one object on one line") from None
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to, which becomes `path` at the end: a reader finds the old or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder of the same name to write into, hidden beside `target`, and to move from once it is complete.

    What is left in it at the end is removed, and so are folders that were made for it and are empty.
    """
    target = target.absolute()
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    made = [parent for parent in (target, *target.parents) if not parent.exists()]
    try:
        (hidden / target.name).mkdir(parents=True)
        yield hidden / target.name
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def replace_folder(folder: Path, target: Path) -> None:
    """Move a staged folder to `target`, in place of what is there; where that fails, it is there again."""
    replaced = folder.with_name(f"{folder.name}.replaced")
    if target.exists():
        target.rename(replaced)
    try:
        folder.rename(target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)


def set_aside(path: Path) -> Path:
    """Rename a damaged file to a free name beside it, which is returned: log.jsonl.damaged, log.jsonl.damaged-2, ..."""
    free, number = path.with_name(f"{path.name}.damaged"), 1
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.name}.damaged-{number}")
    os.replace(path, free)
    return free
