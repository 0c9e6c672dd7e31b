"""What a run was started with, in `<run>/run.json`, and how to do the same again (`unmask train --from RUN`).

One entry for every start: the command line and its folder, the config, what an exact repetition must find unchanged,
package versions, the git state of the folder and of unmask's own source, the machine. On the same machine with the same
versions the repetition has the same losses to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from unmask.config import Config, apply_overrides
from unmask.data.sources import exists
from unmask.errors import UserError, as_path
from unmask.files import read_json, write_whole
from unmask.hardware import processor
from unmask.runs import repository
from unmask.runs.identity import Identity

FILE = "run.json"
PACKAGES = ("unmask", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
#: Of the versions in an older record, those that still mean something.
COMPARED = ("python", *PACKAGES)
#: Config keys that hold a path.
PATHS = ("model.name", "data.train", "data.validation", "data.tokenizer", "data.chat_template")


def begin(run: Identity, step: int, processes: int | None) -> None:
    """Write the run's config, and that it starts after `step` steps on so many processes (None: it has started).

    UserError for a folder that takes no files.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_whole(run.path / "config.yaml", run.config.dump())
        if processes is not None:
            _append(run, step, processes)
    except OSError as error:
        raise UserError(f"checkpoint.path={run.path}: cannot be written: {error.strerror}") from None


def _append(run: Identity, step: int, processes: int) -> None:
    """Append this start, after `step` steps, to the run's record."""
    file = run.path / FILE
    starts = read(file) if step and file.exists() else []
    starts = [start for start in starts if start["step"] <= step]
    starts.append(
        {
            "step": step,
            "time": time.time(),
            "command": shlex.join(sys.argv),
            "folder": os.getcwd(),
            "processes": processes,
            "config": run.config.model_dump(mode="json"),
            "exact": brief(run.exact()),
            "versions": versions(),
            "git": {"folder": repository.state(os.getcwd()), "unmask": repository.state(str(Path(__file__).parent))},
            "machine": machine(run),
        }
    )
    write_whole(file, json.dumps({"format": 1, "starts": starts}, indent=1))


def brief(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint with the long list of the model's shapes replaced by its hash."""
    model = fingerprint["model"]
    return {**fingerprint, "model": {**model, "shapes": _hash(model["shapes"])}}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def versions() -> dict[str, str]:
    """Of Python and the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(run: Identity) -> dict[str, Any]:
    """The hardware as far as it decides bits and speed."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": run.device.type,
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


@dataclass
class Repeat:
    """A run to do again. config: the new run's; exact: what the old one had; changed: keys that the user set anew;
    start: the old run's record."""

    source: Path
    config: Config
    exact: dict[str, Any]
    changed: set[str]
    start: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def given(
    config: str | None, overrides: list[str], source: Path | None, out: Path | None
) -> tuple[Config, Repeat | None]:
    """What a command line asks for: the config of a file, or a run to repeat and its config."""
    if source is None:
        if config is None:
            raise UserError("give a config file, or --from RUN to do a run again")
        if out is not None:
            raise UserError("--out goes with --from; set checkpoint.path=FOLDER instead")
        return Config.load(config, overrides), None
    if config is not None and "=" not in config and not config.startswith("~"):
        raise UserError(f"give a config file ({config}) or --from {source}, not both")
    repeat = again(source, [*([config] if config else []), *overrides], out)
    return repeat.config, repeat


def again(source: str | Path, overrides: Sequence[str] = (), out: str | Path | None = None) -> Repeat:
    """The run in the folder `source`, with `overrides`, in a folder of its own (`out`, or SOURCE-again).

    `Trainer(repeat=again(...)).train()` makes it. UserError when the folder holds no record, or its data or model are
    no longer where they were.
    """
    source = as_path(source, "a run to repeat")
    source = source.parent if source.name.startswith("step-") and not (source / FILE).exists() else source
    if not (source / FILE).exists():
        raise UserError(f"{source}: holds no run that can be repeated: there is no {FILE} in it")
    starts = read(source / FILE)
    start = starts[-1]
    # The config of the end: a program may have changed the length while it ran.
    tree = json.loads(Config.load(source / "config.yaml").model_dump_json())
    kinds = {_numbers_of(each) for each in [tree, *(each["config"] for each in starts)]}
    tree["checkpoint"] |= {"path": str(source.with_name(f"{source.name}-again")), "step": None}
    apply_overrides(tree, overrides)
    if out is not None:
        tree["checkpoint"]["path"] = str(out)
    changed = {override.partition("=")[0].removeprefix("~") for override in overrides}
    _find_paths(tree, changed, source, Path(start["folder"]))
    config = Config.parse(tree, str(source / FILE))
    if Path(config.checkpoint.path).resolve() == source.resolve():
        raise UserError(f"checkpoint.path={source}: is the run to repeat; name another folder with --out")
    found = Repeat(source, config, start["exact"], changed, start)
    if len(kinds) > 1:
        found.notes.append(f"the settings of {source} changed on its way; repeated are the last ones")
    return found


def _find_paths(tree: dict[str, Any], changed: set[str], source: Path, folder: Path) -> None:
    """Make paths that were relative to another folder whole; UserError for one that leads nowhere now."""
    if tree["data"]["train"] is None:
        raise UserError(
            f"{source}: its training data were handed over in Python and are in no file; run that program again, or "
            f"give data.train=PATH"
        )
    for key in PATHS:
        section, name = key.split(".")
        if key not in changed:
            tree[section][name] = _found(tree[section][name], key, source, folder)


def _found(value: Any, key: str, source: Path, folder: Path) -> Any:
    """`value` with every path in it leading somewhere: a path, a list of them, {name: path} or {path, ...}."""
    if isinstance(value, list):
        return [_found(each, f"{key}.{number}", source, folder) for number, each in enumerate(value)]
    if isinstance(value, dict):
        names = ["path"] if "path" in value else list(value)
        return {**value, **{name: _found(value[name], f"{key}.{name}", source, folder) for name in names}}
    if not isinstance(value, str):
        return value
    for candidate in (value, str(folder / value)):
        if exists(candidate):
            return candidate
    raise UserError(f"{source}: {key}={value} is no longer there; say where it is now: {key}=PATH")


def _numbers_of(config: dict[str, Any]) -> str:
    """A config without what decides no number, as text."""
    return json.dumps({key: value for key, value in config.items() if key not in ("checkpoint", "log", "evaluation")})


def compare(repeat: Repeat | None, run: Identity, processes: int) -> list[str]:
    """What may keep a repetition from having the same bits, in sentences; UserError for what makes it another run."""
    if repeat is None:
        return []
    from unmask.runs.resume import differences

    notes = list(repeat.notes)
    now = brief(run.exact())
    if not isinstance(repeat.exact.get("model"), dict):
        notes.append(f"{repeat.source} has no description of its model that could be compared; the bits may differ")
        now.pop("model")
    before = {key: value for key, value in repeat.exact.items() if key in now or key != "model"}
    for key, difference in differences(before, now, run):
        if key.partition(".")[0] == "model" and any(each.startswith("model") for each in repeat.changed):
            continue
        if key == "data.train" and key in repeat.changed:
            notes.append(f"data.train holds other data than {repeat.source} was trained on")
        elif key not in repeat.changed and not any(key.startswith(f"{each}.") for each in repeat.changed):
            raise UserError(f"{repeat.source} cannot be repeated: {difference}; restore that, or set it on purpose")
    then = repeat.start
    for what, now in (("versions", versions()), ("machine", machine(run))):
        recorded = {key: value for key, value in then[what].items() if what == "machine" or key in COMPARED}
        changed = [f"{key} {now.get(key)} (then {value})" for key, value in recorded.items() if now.get(key) != value]
        if changed:
            notes.append(f"not the {what} of {repeat.source}: {', '.join(changed)}; the bits may differ")
    if then["processes"] != processes:
        notes.append(f"{processes} processes, and {repeat.source} had {then['processes']}; the bits may differ")
    commit = (then["git"]["unmask"] or {}), (repository.state(str(Path(__file__).parent)) or {})
    if commit[0] != commit[1]:
        notes.append(f"unmask's source is not what it was when {repeat.source} was trained; the bits may differ")
    return notes


class Made(BaseModel):
    """One start of a run, as `begin` writes it."""

    step: int
    command: str
    folder: str
    processes: int
    config: dict[str, Any]
    exact: dict[str, Any]
    versions: dict[str, str]
    git: dict[str, dict[str, Any] | None]
    machine: dict[str, Any]


class Record(BaseModel):
    """The contents of run.json."""

    starts: list[Made] = Field(min_length=1)


def read(file: Path) -> list[dict[str, Any]]:
    """The starts of a run, the last of them last; UserError for a file that does not tell them."""
    found = read_json(file, "take it from a copy of the run, or start another from its config.yaml")
    try:
        Record.model_validate(found, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: cannot be read as the record of a run: {where}: {first['msg']}") from None
    return list(found["starts"])
