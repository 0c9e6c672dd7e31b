"""What a run says of itself before its first step, and how long it will take.

The time is steps * FLOPs of the first step / (share * FLOP/s), with the FLOP/s of `unmask.training.speed` and a lowest
and a highest share; of a run that goes on, the tokens that are left over the pace in its log.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from unmask.rows import Rows, flops
from unmask.tracking.jsonl import read
from unmask.training.setup import Run
from unmask.training.source import Batch, Step, asked
from unmask.training.speed import peak_flops

#: The least and the most of a matrix product's rate that whole steps reach (MFU), by kind of device: on CPUs as small
#: runs of `ar`, `mdlm` and `block_diffusion` measured it, on GPUs unmeasured and therefore wide.
SHARES = {"cpu": (0.3, 0.7), "cuda": (0.1, 0.6)}
#: Records of the log, from its end, whose median is the pace of a run that goes on.
RECENT = 20


def header(run: Run, step: int, mesh: Any) -> list[str]:
    """Three lines: the model, the data, the folder and the time; none where no console shows them."""
    if not mesh.first or run.config.log.console == "none":
        return []
    batch = first(run)
    size, left = sum(map(math.prod, run.shapes.values())), run.steps - step
    device = f"{run.device}, {mesh.size} processes" if mesh.size > 1 else str(run.device)
    seconds = None if batch is None else predicted(run, batch.micro, step, mesh.size)
    ends = dict.fromkeys(str(timedelta(seconds=math.ceil(each))) for each in seconds or ())
    time = f", about {' to '.join(ends)}" if ends and left else ""
    steps = f"{left:,} of {run.steps:,} steps" + (f" of {batch.tokens:,} tokens" if batch else "")
    return [
        f"{run.model.config.model_type}, {_short(size)} parameters, {run.config.objective.chosen}, on {device}",
        run.source.described(),
        f"{run.path}: {steps} to do{time}",
    ]


def first(run: Run) -> Batch | None:
    """The first step's rows of all replicas; None where its source can tell them in their turn only."""
    return asked(run.source, Step(0, run.steps, 0, run.objective)) if run.source.ahead else None


def predicted(run: Run, micro: Sequence[Rows], step: int, processes: int) -> tuple[float, float] | None:
    """(least, most) seconds from `step` to the end, without evaluations and checkpoints; micro: rows of a step.

    Both are the same where the log has the pace. None where nothing is known: on a GPU that is not in the table, in a
    pipeline, of several processes on a CPU.
    """
    pace = logged_pace(run) if step else None
    if pace:
        seconds = (run.steps - step) * run.source.batch(Step(step, run.steps, 0, run.objective)).tokens / pace
        return seconds, seconds
    if run.config.parallel.pipeline_stages > 1 or (processes > 1 and run.device.type == "cpu"):
        return None
    rate, shares = peak_flops(run.device, run.precision.dtype), SHARES.get(run.device.type)
    if rate is None or shares is None:
        return None
    work = (run.steps - step) * sum(flops(rows, run.row_model.shape) for rows in micro)
    return work / (shares[1] * rate * processes), work / (shares[0] * rate * processes)


def logged_pace(run: Run) -> float | None:
    """Tokens per second of the run so far: the median of its last records."""
    file = run.path / "log.jsonl"
    records = read(file) if file.exists() else []
    rates = [each["tokens_per_second"] for each in records if each["kind"] == "step" and "tokens_per_second" in each]
    return statistics.median(rates[-RECENT:]) if rates else None


def _short(count: int) -> str:
    """1,234,567 as "1.2 million"."""
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return f"{count:,}"
