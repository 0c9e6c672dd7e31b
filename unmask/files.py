"""Small files of ours and of others: JSON that is read, text that is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.parsing import json_value

#: Levels of lists and objects in a JSON file; deeper ones exhaust the stack of whoever walks through them.
DEPTH = 64


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for a text that is none, or whose lists and objects lie too deep."""
    value = json_value(text)
    level = [value]
    for _ in range(DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
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


def write_whole(path: Path, text: str) -> None:
    """Write a text file beside `path` and rename it, so that whoever reads `path` finds the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file to a free name beside it, which is returned: log.jsonl.damaged, log.jsonl.damaged-2, ..."""
    free, number = path.with_name(f"{path.name}.damaged"), 1
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.name}.damaged-{number}")
    os.replace(path, free)
    return free
