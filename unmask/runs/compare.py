"""Several runs side by side: where their configs differ, how far they came, and their losses at the same point.

Read from `config.yaml` and `log.jsonl` alone, so that a run may still be going. Runs are compared at the last step, or
the last number of tokens, that all of them have reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unmask.config import Config, flat
from unmask.errors import UserError
from unmask.parsing import yaml_value
from unmask.tracking import Record
from unmask.tracking.jsonl import read

#: A logged loss scatters with its noise levels; beside it stands the mean of this many, or of as many as there are.
RECENT = 20
#: Differs between any two runs.
OWN = ("checkpoint.path",)

#: What a record has to hold.
NEEDED = {"step": ("steps", "loss", "tokens"), "evaluation": ("nats_per_token",)}

Facts = dict[str, Any]


def compare(runs: Sequence[Path], by: str = "step") -> Facts:
    """The facts of runs (folders) or configs (YAML files), at the last point by `step` or `tokens` that all reached.

    {by, at, runs: [{run, step, loss, ...}], config: {key: [value of each]} where they differ}. A figure that a run does
    not have is None. UserError for what is neither, and for a damaged log.
    """
    if by not in ("step", "tokens"):
        raise UserError(f"--by {by}: compare runs by step or by tokens")
    logs = [_log(run / "log.jsonl") if run.is_dir() and (run / "log.jsonl").exists() else [] for run in runs]
    configs = [_config(run) for run in runs]
    histories = [_history([record for record in log if record["kind"] == "step"]) for log in logs]
    reached = [history[-1][by] for history in histories if history]
    at = min(reached) if len(reached) > 1 else None
    figures = [
        {"run": str(run), **_figures(log, history, by, at)}
        for run, log, history in zip(runs, logs, histories, strict=True)
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys if key not in OWN}
    differing = {key: each for key, each in values.items() if any(value != each[0] for value in each)}
    return {"by": by, "at": at, "runs": figures, "config": differing}


def _log(path: Path) -> list[Record]:
    """The records of a log; UserError for one that lacks what is compared."""
    records = read(path)
    for record in records:
        for key in NEEDED.get(record["kind"], ()):
            if key not in record:
                raise UserError(f"{path}: the {record['kind']} of step {record['step']} has no {key}; remove that line")
    return records


def _config(run: Path) -> dict[str, Any]:
    """The keys of a run's config and their values; those that an earlier version did not know have their defaults."""
    file = run / "config.yaml" if run.is_dir() else run
    if not file.exists():
        what = "holds no config.yaml, so it is no run" if run.is_dir() else "no such run or config"
        raise UserError(f"{run}: {what}")
    if not run.is_dir():
        return dict(flat(Config.load(file).model_dump(mode="json")))
    try:
        tree = yaml_value(file.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise UserError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: a config is a mapping of sections, not a {type(tree).__name__}")
    return {**dict(flat(Config().model_dump(mode="json"))), **dict(flat(tree))}


def _history(steps: Sequence[Record]) -> list[Record]:
    """The records of steps, with all tokens (`tokens`) and seconds up to each.

    A record has the tokens of its own step, which stand for the steps since the record before it.
    """
    history, last, tokens, seconds = [], 0, 0.0, 0.0
    for record in steps:
        new = record["tokens"] * (record["step"] - last)
        last = record["step"]
        tokens += new
        seconds += new / record["tokens_per_second"] if record.get("tokens_per_second") else 0.0
        history.append({**record, "tokens": round(tokens), "seconds": seconds})
    return history


def _figures(log: Sequence[Record], history: Sequence[Record], by: str, at: float | None) -> Facts:
    """What one run has to show, for the whole of it and at the common point."""
    last = history[-1] if history else {}
    best = min(history, key=lambda record: _ordered(record["loss"]), default={})
    bounds = [record for record in log if record["kind"] == "evaluation"]
    best_bound = min(bounds, key=lambda record: _ordered(record["nats_per_token"]), default={})
    common = [record for record in history if at is not None and record[by] <= at]
    there = [record for record in bounds if common and record["step"] <= common[-1]["step"]]
    return {
        **{key: last.get(key) for key in ("step", "steps", "tokens", "seconds", "loss")},
        "mean_loss": _mean(history),
        "best_loss": best.get("loss"),
        "best_loss_step": best.get("step"),
        "loss_at": _mean(common),
        "validation": bounds[-1]["nats_per_token"] if bounds else None,
        "best_validation": best_bound.get("nats_per_token"),
        "best_validation_step": best_bound.get("step"),
        "validation_at": there[-1]["nats_per_token"] if there else None,
        **{key: _median(history, key) for key in ("tokens_per_second", "mfu")},
        "memory": max((record["memory"] for record in history if "memory" in record), default=None),
    }


def _ordered(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _mean(history: Sequence[Record]) -> float | None:
    recent = [record["loss"] for record in history[-RECENT:] if math.isfinite(record["loss"])]
    return fmean(recent) if recent else None


def _median(history: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in history if record.get(key) is not None]
    return median(values) if values else None
