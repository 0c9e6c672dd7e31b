"""What is damaged beside a good checkpoint does not stop a run: it is set aside, and told in a line each."""

from __future__ import annotations

import json
from pathlib import Path

from unmask.errors import UserError
from unmask.files import set_aside, write_whole
from unmask.runs.record import FILE, read
from unmask.tracking.jsonl import parsed


def mend(run: Path, step: int, every: int) -> list[str]:
    """Make the record and the log of a run that goes on after `step` readable; returns what was amiss, in sentences.

    A damaged file stays beside the new one. every: steps between two lines of the log.
    """
    return [*(_record(run / FILE) if step else []), *_log(run / "log.jsonl", step, every)]


def _record(file: Path) -> list[str]:
    if not file.exists():
        return [f"{file} is gone, so earlier starts of this run are not known any more"]
    try:
        read(file)
    except UserError:
        return [f"{file} was damaged: it is kept as {set_aside(file).name}, and a new one begins with this start"]
    return []


def _log(file: Path, step: int, every: int) -> list[str]:
    if not file.exists():
        return [f"{file} is gone: the log begins anew after step {step}"] if step else []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    found = [(number, parsed(line)) for number, line in enumerate(lines, 1) if line.strip()]
    whole = [record for _, record in found if record is not None]
    # A last line without its newline is what a killed process leaves, and is written again.
    damaged = [number for number, record in found if record is None and number < len(lines)]
    notes = []
    if damaged:
        kept = set_aside(file)
        write_whole(file, "".join(json.dumps(record) + "\n" for record in whole))
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        notes.append(f"{file}:{damaged[0]}{more} was damaged: the log continues without it, and is kept as {kept.name}")
    steps = [record["step"] for record in whole if record["kind"] == "step" and record["step"] <= step]
    last, before = ([0, 0] + steps)[-1], ([0, 0] + steps)[-2]
    if step and last + max(every, last - before) <= step:
        notes.append(f"{file} ends at step {last}, and the run is resumed after {step}: the steps between are lost")
    return notes
