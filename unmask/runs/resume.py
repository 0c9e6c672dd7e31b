"""From which checkpoint a run goes on, and what must be unchanged for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmask.config import Config, flat
from unmask.errors import UserError
from unmask.models.special import KINDS
from unmask.runs import folder as layout
from unmask.runs.identity import Identity, settings_of

#: In a fingerprint: chunks of documents that teach nothing and are not trained on.
LEFT_OUT = "data.parts_left_out"
#: Of what a record holds only so that it can be compared, no value is shown.
HASHES = ("data.train", "model.shapes")


def continued(run: Identity) -> Path | None:
    """The checkpoint that a run goes on from, or None; UserError when it is damaged, unwanted or another run's."""
    checkpoint = run.config.checkpoint
    folder = layout.newest(run.path, checkpoint.step)
    if folder is None:
        return None
    if not checkpoint.resume:
        raise UserError(
            f"checkpoint.path={run.path}: holds a run already ({folder.name}); "
            f"set checkpoint.resume=true to continue it, or choose another folder"
        )
    layout.verify(folder, training=True)
    for _, difference in differences(layout.state_of(folder)["exact"], run.exact(), run):
        raise UserError(
            f"{folder} cannot be continued exactly: {difference}; "
            f"restore that, or start a new run in another checkpoint.path"
        )
    return folder


#: Settings that change no number of a run.
SILENT = ("checkpoint.", "log.", "parallel.", "training.device", "data.train", "data.validation")


def changes(folder: Path, config: Config) -> list[str]:
    """A line that names every setting with other effect than the checkpoint's own; nothing where there is none."""
    try:
        before = dict(flat(Config.load(folder / "config.yaml").model_dump(mode="json")))
    except UserError as error:
        return [f"its settings cannot be compared with those of now: {error}"]
    now = dict(flat(config.model_dump(mode="json")))
    changed = [
        f"{key} {_value(before.get(key))} -> {_value(now.get(key))}"
        for key in {**before, **now}
        if before.get(key) != now.get(key) and not key.startswith(SILENT)
    ]
    return [f"changed since: {', '.join(changed)}"] if changed else []


def _value(value: Any) -> str:
    return "unset" if value is None else str(value)


def differences(before: dict[str, Any], now: dict[str, Any], run: Identity) -> Iterator[tuple[str, str]]:
    """(key, what a user is told of it) of everything in which two fingerprints, `now` that of `run`, differ.

    What one of them lacks stands at its default there: a record knows nothing of an option that is younger. The model's
    special tokens may change, for no loss depends on them.
    """
    was, ours = dict(_leaves(before)), dict(_leaves(now))
    for key in sorted({**ours, **was}, key="model.shapes".__eq__):  # last: a value tells more
        if key.startswith("model.config.") and key.rpartition(".")[2] in KINDS:
            continue
        if (key not in was or key not in ours) and (default := _default(run, key)) is not None:
            was.setdefault(key, *default)
            ours.setdefault(key, *default)
        if key not in was:
            yield key, f"{key}={ours[key]}, but it was not set"
        elif key not in ours:
            yield key, f"{key} is not set, but it was {was[key]}"
        elif was[key] != ours[key]:
            yield key, f"{key} is not what it was" if key in HASHES else f"{key}={ours[key]}, but it was {was[key]}"


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a fingerprint; lists and shapes are values."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in HASHES:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _default(run: Identity, key: str) -> tuple[Any] | None:
    """The default of `key` of a fingerprint; None where it has none."""
    section, _, name = key.partition(".")
    if section == "objective":
        found, key = type(run.objective).model_construct().model_dump(mode="json"), name
    elif key.startswith("model.config."):
        found = dict(_leaves(settings_of(type(run.model)()), "model.config."))
    else:
        found = {LEFT_OUT: 0, **dict(_leaves(Config().model_dump(mode="json")))}
    return (found[key],) if key in found else None
