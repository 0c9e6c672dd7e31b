"""Where the numbers of a run go: a JSONL log and the console always, others by name.

A tracker is a class made without arguments, with the methods of `Tracker`. Third parties add one with an entry point of
group `unmask.trackers` and name it in the config's `log.trackers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unmask.registry import Registry

trackers = Registry(
    "tracker",
    {"jsonl": "unmask.tracking.jsonl:JsonLines", "console": "unmask.tracking.console:ConsoleTracker"},
)

#: One logged event. kind "step" carries loss, learning_rate, grad_norm, tokens_per_second, ...; kind "evaluation"
#: carries nats_per_token and standard_error (of several sets also nats_per_token/NAME, ...); kind "rollback" says that
#: the run went back to `step` after a loss spike, so that later steps come again. All carry step and steps.
Record = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """What a tracker is told when a run starts: its folder, the step it starts after, its length and its config."""

    path: Path
    step: int
    steps: int
    config: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    def start(self, run: Start) -> None:
        """The run begins, or goes on after `run.step` steps."""

    def log(self, record: Record) -> None:
        """Numbers of a step or an evaluation."""

    def message(self, text: str) -> None:
        """A sentence for whoever watches: a resume, a skipped step, a saved checkpoint."""

    def close(self) -> None:
        """The run is over, by whatever cause."""


__all__ = ["Record", "Start", "Tracker", "trackers"]
