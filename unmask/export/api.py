"""`export`: from a checkpoint folder to a folder in another format. A format is a function (OpenModel, folder)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unmask.errors import UserError, as_path, disk_refusal
from unmask.files import staged
from unmask.hf import read_config
from unmask.models.families import origin_of
from unmask.objectives import Objective
from unmask.registry import Registry
from unmask.runs.folder import saved_steps
from unmask.runs.open import ADAPTERS, OpenModel, open_model
from unmask.terminal import say

formats = Registry(
    "format",
    {
        "hf": "unmask.export.hf:write",
        "family": "unmask.export.family:write",
        "peft": "unmask.export.peft:write",
    },
)

#: What the formats write. Of an earlier export over the same folder, any of it would be read in place of the new one.
WRITTEN = (
    "model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json",
    "config.json", "generation_config.json", "adapter_model.safetensors", "adapter_config.json", ADAPTERS,
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    objective: str | Objective | None = None,
    mask_token_id: int | None = None,
) -> Path:
    """Write the model of `checkpoint` (a run, one of its steps, an exported folder) to the folder `output`.

    format: default peft for a model with adapters (hf merges them into the weights), family for one that came in the
    layout of another family, else hf. dtype: of the weights ("bfloat16"); default as they were trained. objective,
    mask_token_id: of a folder that does not say them, see `open_model`; what it assumes goes to stderr. Raises
    UserError for an unknown format, for a folder that is read from or holds checkpoints and, unless `force`, for one
    that already holds something. What is interrupted leaves the folder as it was.
    """
    if format is not None:
        formats[format]
    folder = as_path(output, "the folder to export to")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder to export to")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UserError(f"{folder}: is not empty; name another folder, or overwrite it with --force")
    opened = open_model(checkpoint, dtype=dtype, objective=objective, mask_token_id=mask_token_id)
    for note in opened.notes:
        say(note, file=sys.stderr)
    _check_apart(folder, checkpoint, opened)
    own = "family" if origin_of(opened.model) else "hf"
    write = formats[format or (own if opened.settings is None else "peft")]
    try:
        with filled(folder) as new:
            write(opened, new)
    except Exception as error:
        if refusal := disk_refusal(error):
            raise UserError(f"{folder}: cannot be written: {refusal}; make room, or name another folder") from error
        raise
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """What an exported folder holds, as plain values: {path, bytes, files: {name: bytes}}."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    return {"path": str(folder), "bytes": sum(files.values()), "files": files}


def _check_apart(folder: Path, checkpoint: str | Path, opened: OpenModel) -> None:
    """UserError where the export would be written over what it is made of."""
    base = opened.settings.name if opened.settings else None
    for source, what in ((checkpoint, "what is exported"), (base, "the base of the adapters")):
        if source is not None and Path(source).resolve() == folder.resolve():
            raise UserError(f"{folder}: is {what}, and would be overwritten; name another folder")
    if saved_steps(folder) or (folder / "state.json").exists():
        raise UserError(f"{folder}: holds checkpoints of a run; name another folder to export to")


def _outdated(folder: Path, new: set[str]) -> list[Path]:
    """Files of `folder` from an earlier export that a new one, of files `new`, does not replace; never others."""
    found = [path for name in WRITTEN for path in folder.glob(name) if path.name not in new and not path.is_dir()]
    return [path for path in found if path.name != "config.json" or _is_of_a_model(path)]


def _is_of_a_model(path: Path) -> bool:
    try:
        return "model_type" in read_config(path.parent)
    except UserError:
        return False


def _readable(folder: Path) -> None:
    """Let others read the files as the umask says: safetensors makes its own for their owner alone."""
    os.umask(mask := os.umask(0o077))
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


@contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """A folder of the same name to write into, whose files move to `folder` once they are complete."""
    with staged(folder) as new:
        yield new
        _readable(new)
        if not folder.exists():
            new.rename(folder)
            return
        for old in _outdated(folder, {path.name for path in new.iterdir()}):
            old.unlink()
        for path in sorted(new.iterdir()):
            if (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            path.replace(folder / path.name)
