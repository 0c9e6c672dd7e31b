"""Where the numbers of a run go: a JSONL log and the console always, others by name.

A tracker is a class made without arguments, or with one, its options, where it has an `Options` (a config Section).
Third parties add one with an entry point of group `unmask.trackers` and name it in the config's `log.trackers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unmask.config import LogConfig
from unmask.errors import UserError
from unmask.registry import Registry, nearest

#: Those of every run.
ALWAYS = ("jsonl", "console")

trackers = Registry(
    "tracker",
    {
        "jsonl": "unmask.tracking.jsonl:JsonLines",
        "console": "unmask.tracking.console:ConsoleTracker",
        "tensorboard": "unmask.tracking.tensorboard:TensorBoard",
        "trackio": "unmask.tracking.trackio:Trackio",
        "wandb": "unmask.tracking.wandb:WeightsAndBiases",
        "mlflow": "unmask.tracking.mlflow:MLflow",
    },
)

#: One logged event. kind "step" carries loss, learning_rate, grad_norm, tokens_per_second, ...; kind "evaluation"
#: carries nats_per_token and standard_error (of several sets also nats_per_token/NAME, ...); kind "rollback" says that
#: the run went back to `step` after a loss spike, so that later steps come again; kind "restart" that a launcher
#: started it again by itself, and why. All carry step and steps.
Record = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """What a tracker is told when a run starts: its folder, the step it starts after, its length and its config.

    logged: the last step of each kind of record that the log had, before a run that goes on cut it back to `step`.
    """

    path: Path
    step: int
    steps: int
    config: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, int] = field(default_factory=dict)


class Tracker(Protocol):
    def start(self, run: Start) -> None:
        """The run begins, or goes on after `run.step` steps."""

    def log(self, record: Record) -> None:
        """Numbers of a step or an evaluation."""

    def message(self, text: str) -> None:
        """A sentence for whoever watches: a resume, a skipped step, a saved checkpoint."""

    def close(self) -> None:
        """The run is over, by whatever cause."""


def build(log: LogConfig, warn: Callable[[str], None]) -> list[Tracker]:
    """The trackers of a run: the log, the console, and those that `log` names, each of which works beside the run.

    warn: is told once, in a sentence, about a tracker that fails. Raises UserError for what `check` refuses.
    """
    from unmask.tracking.background import Background

    named = {name: _made(name, log.options.get(name, {})) for name in _names(log)}
    return [trackers[name]() for name in ALWAYS] + [Background(name, made, warn) for name, made in named.items()]


def check(log: LogConfig) -> None:
    """UserError for an unknown tracker, one whose package is missing, and options that it does not take."""
    for name in _names(log):
        _made(name, log.options.get(name, {}))


def _names(log: LogConfig) -> list[str]:
    for position, name in enumerate(log.trackers):
        if name in ALWAYS:
            raise UserError(f"log.trackers: {name} is always there: leave it out")
        if name in log.trackers[:position]:
            raise UserError(f"log.trackers names {name} twice")
    for name in log.options:
        if name not in log.trackers:
            hint = nearest(name, log.trackers)
            raise UserError(f"log.options.{name} has no effect{hint}: name {name} in log.trackers, or leave it out")
    return log.trackers


def _made(name: str, options: dict[str, Any]) -> Tracker:
    kind = trackers[name]
    section = getattr(kind, "Options", None)
    if section is not None:
        return kind(section.parse(options, f"log.options.{name}"))
    if options:
        raise UserError(f"log.options.{name}: the tracker {name} takes no options")
    return kind()


__all__ = ["ALWAYS", "Record", "Start", "Tracker", "build", "check", "trackers"]
