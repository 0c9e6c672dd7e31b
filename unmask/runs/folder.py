"""The folder of a run: where its checkpoints are, and whether one is whole.

<run>/config.yaml                  the resolved config
<run>/run.json                     what the run was started with, once for every start
<run>/log.jsonl                    one object per logged step
<run>/best                         a link to the checkpoint of the lowest bound, under checkpoint.best
<run>/step-00000010/               one checkpoint, complete by the time it has this name
    .metadata, *.distcp            model, EMA weights, optimiser and random state (torch DCP, reshardable)
    state.json                     step, objective, loss scale, and what an exact resume must find unchanged
    hf/                            config.json and the tokeniser
    config.yaml, manifest.json     the manifest holds the size and SHA-256 of every file
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from unmask.errors import UserError
from unmask.files import parse_json, read_json

MANIFEST = "manifest.json"
BEST = "best"
#: RUN/ema, RUN/best/ema and so on name the EMA weights of a checkpoint; there is no such folder.
EMA = "ema"
_NAME = re.compile(r"step-([0-9]{8,})")


def step_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """The steps of a run that have a checkpoint, in order."""
    if not run.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in run.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def newest(run: Path, step: int | None = None) -> Path | None:
    """The folder of a run's newest checkpoint, or of `step`; None for a run without checkpoints."""
    steps = saved_steps(run)
    if step is not None and step not in steps:
        known = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise UserError(f"{run}: no checkpoint of step {step}; {known}")
    if not steps:
        return None
    return step_folder(run, steps[-1] if step is None else step)


def step_of(path: Path) -> Path | None:
    """The folder of a step that a path stands for: a run's newest, RUN/best, or itself; None for any other path."""
    if not path.is_dir():
        return None
    if path.name == BEST and path.is_symlink():
        path = path.parent / path.readlink()
    return path if (path / "state.json").exists() or _NAME.fullmatch(path.name) else newest(path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """name -> {bytes, sha256} of every file below `folder` but the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}


def verify(folder: Path, *, training: bool = False) -> None:
    """Raise UserError, naming the file, unless `folder` holds exactly what was written to it.

    training: an earlier checkpoint is chosen by its key in the config, not by its folder.
    """
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        raise UserError(
            f"{folder / MANIFEST}: missing, so the checkpoint cannot be trusted; {_others(folder, training)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / MANIFEST}: not a manifest; {_others(folder, training)}") from None
    if not isinstance(manifest, dict) or not all(_is_entry(known) for known in manifest.values()):
        raise UserError(f"{folder / MANIFEST}: not a manifest; {_others(folder, training)}")
    for name, known in manifest.items():
        path = folder / name
        if not path.is_file():
            damage = "is missing"
        elif (size := path.stat().st_size) != known["bytes"]:
            damage = f"has {size} bytes, not the {known['bytes']} that were written"
        elif digest(path) != known["sha256"]:
            damage = "was altered after it was written (its SHA-256 differs)"
        else:
            continue
        raise UserError(f"{path}: {damage}; {_others(folder, training)}")


def _is_entry(known: Any) -> bool:
    return isinstance(known, dict) and isinstance(known.get("bytes"), int) and isinstance(known.get("sha256"), str)


def _others(folder: Path, training: bool) -> str:
    match = _NAME.fullmatch(folder.name)
    earlier = [step for step in saved_steps(folder.parent) if match and step < int(match[1])]
    if not earlier:
        return "there is no earlier checkpoint in this run"
    if training:
        return f"resume from an earlier one with checkpoint.step={earlier[-1]}"
    return f"name the folder of another step, such as {step_folder(folder.parent, earlier[-1])}"


class State(BaseModel):
    """What state.json holds; what else does, the parts of a training run look at themselves."""

    step: int = Field(ge=0)
    steps: int = Field(ge=0)
    objective: dict[str, Any]
    exact: dict[str, Any]
    best: tuple[int, float] | None = None
    streak: int = 0
    overflows: int = 0


def state_of(folder: Path) -> dict[str, Any]:
    """The contents of state.json; UserError where they are damaged."""
    path, hint = folder / "state.json", "take another checkpoint"
    found = read_json(path, hint)
    try:
        State.model_validate_json(json.dumps(found), strict=True)  # as JSON: a list is a tuple
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {hint}") from None
    return found


@contextmanager
def taking_up(folder: Path) -> Iterator[None]:
    """Tell what cannot be made of the contents of state.json as a mistake of that file."""
    try:
        yield
    except (UserError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if str(folder) in str(error):
            raise
        reason = " ".join(str(error).split()) if isinstance(error, UserError) else f"{type(error).__name__} {error}"
        raise UserError(f"{folder / 'state.json'}: is damaged ({reason[:200]}); take another checkpoint") from error
