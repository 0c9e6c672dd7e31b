"""`export`: from a checkpoint folder to a folder in another format. A format is a function (OpenModel, folder)."""

from __future__ import annotations

import shutil
from pathlib import Path

from unmask.errors import UserError
from unmask.models.checkpoints import open_model
from unmask.registry import Registry

DTYPES = ("float32", "float64", "bfloat16", "float16")
formats = Registry("format", {"hf": "unmask.export.hf:write"})


def export(
    checkpoint: str | Path, output: str | Path, *, format: str = "hf", dtype: str | None = None, force: bool = False
) -> Path:
    """Write the model of `checkpoint` (a run, one of its steps, an exported folder) to the folder `output`.

    dtype: of the weights ("bfloat16"); default as they were trained. Raises UserError for an unknown format and, unless
    `force`, for a folder that already holds something.
    """
    write = formats[format]
    if dtype not in (None, *DTYPES):
        raise UserError(f"dtype={dtype}: not a dtype of weights; known: {', '.join(DTYPES)}")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder to export to")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UserError(f"{folder}: is not empty; name another folder, or overwrite it with --force")
    opened = open_model(checkpoint, dtype=dtype)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(opened, folder)
    except OSError as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder
