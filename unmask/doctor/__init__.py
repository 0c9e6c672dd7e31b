"""`unmask doctor`: what this machine can do, what is missing, and whether a training step and a sample work on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.doctor import machine, packages, trial


def examine(folder: Path) -> dict[str, Any]:
    """All facts; runs would be written to `folder`. `problems` lists what must be mended, `advice` what may be."""
    needed, broken = packages.required()
    found = {"python": machine.python(), "packages": needed, "extras": packages.optional(), "tools": packages.tools()}
    if broken:  # what follows needs them
        return {**found, "problems": broken, "advice": []}
    devices = machine.devices()
    disk, full = machine.disk(folder)
    tried, failed = trial.attempt()
    found |= {"cpu": machine.cpu(), "devices": devices, "distributed": machine.distributed(), "disk": disk}
    return {
        **found,
        "trial": tried,
        "problems": [*full, *failed],
        "advice": [*machine.advice(devices), *_missing(found)],
    }


def _missing(found: dict[str, Any]) -> list[str]:
    extras = [f"pip install 'unmask[{name}]' for {each['for']}" for name, each in found["extras"].items()
              if each["version"] is None]  # fmt: skip
    return extras + [f"install {each['package']} for {each['for']}" for each in found["tools"].values()
                     if each["path"] is None]  # fmt: skip
