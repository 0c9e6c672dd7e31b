"""From which checkpoint a run goes on, and what must be unchanged for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.models import checkpoints as layout
from unmask.training.setup import Run


def continued(run: Run) -> Path | None:
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
    for _, difference in differences(layout.state_of(folder)["exact"], run.fingerprint()):
        raise UserError(
            f"{folder} cannot be continued exactly: {difference}; "
            f"restore that, or start a new run in another checkpoint.path"
        )
    return folder


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what a user is told of it) of everything in which two fingerprints differ."""
    for key in {**now, **before}:
        was, ours = before.get(key), now.get(key)
        if was != ours:
            plain = not isinstance(was, dict) and not isinstance(ours, dict) and key not in ("data.train", "model")
            yield key, f"{key}={ours}, but it was {was}" if plain else f"{key} is not what it was"
