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


def table(facts: dict[str, Any]) -> str:
    """The facts as text: a section each, then the problems and the advice."""
    lines: list[str] = []
    for section, values in facts.items():
        if section in ("problems", "advice"):
            continue
        lines += [section, *(f"  {line}" for line in _lines(values))]
    for section, text in (("problems", "nothing required is broken"), ("advice", "nothing to add")):
        lines += [section, *(f"  {line}" for line in facts[section] or [text])]
    return "\n".join(lines)


def _lines(values: dict[str, Any]) -> list[str]:
    width = max(map(len, values))
    return [f"{name.replace('_', ' '):<{width}}  {_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "for" in value:  # a package or a program
        return f"{value.get('version') or value.get('path') or 'missing'}, for {value['for']}"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(each)}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return "no" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
