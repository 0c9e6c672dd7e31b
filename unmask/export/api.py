"""`export`: from a checkpoint folder to a folder in another format. A format is a function (OpenModel, folder)."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unmask.errors import UserError, as_path, disk_refusal
from unmask.models.checkpoints import open_model
from unmask.registry import Registry

formats = Registry("format", {"hf": "unmask.export.hf:write", "peft": "unmask.export.peft:write"})


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    force: bool = False,
) -> Path:
    """Write the model of `checkpoint` (a run, one of its steps, an exported folder) to the folder `output`.

    format: default peft for a model with adapters (hf merges them into the weights), else hf. dtype: of the weights
    ("bfloat16"); default as they were trained. Raises UserError for an unknown format and, unless `force`, for a folder
    that already holds something. What is interrupted leaves the folder as it was.
    """
    if format is not None:
        formats[format]
    folder = as_path(output, "the folder to export to")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder to export to")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UserError(f"{folder}: is not empty; name another folder, or overwrite it with --force")
    opened = open_model(checkpoint, dtype=dtype)
    write = formats[format or ("hf" if opened.settings is None else "peft")]
    try:
        with _filled(folder) as staged:
            write(opened, staged)
    except Exception as error:
        if refusal := disk_refusal(error):
            raise UserError(f"{folder}: cannot be written: {refusal}; make room, or name another folder") from error
        raise
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """What an exported folder holds, as plain values: {path, bytes, files: {name: bytes}}."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    return {"path": str(folder), "bytes": sum(files.values()), "files": files}


@contextmanager
def _filled(folder: Path) -> Iterator[Path]:
    """A folder of the same name to write into, beside `folder`, whose files move there once they are complete."""
    hidden = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    staged = hidden / folder.name
    made = [parent for parent in (folder.absolute(), *folder.absolute().parents) if not parent.exists()]
    try:
        staged.mkdir(parents=True)
        yield staged
        if not folder.exists():
            staged.rename(folder)
            return
        for old in folder.glob("*.safetensors*"):  # of another number of shards, they would be read instead
            old.unlink()
        for path in sorted(staged.iterdir()):
            if (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
