"""The console of a run, on stderr: a live progress line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

from unmask.terminal import shown
from unmask.tracking import Record, Start

#: Seconds that an ETA does not go beyond: a thousand years.
FOREVER = 3.2e10


class ConsoleTracker:
    """Progress, ETA, nll, tokens per second, MFU and memory; `log.console` is auto, rich, plain or none."""

    def __init__(self) -> None:
        self.console: Any = None
        self._progress: Any = None
        self._task: Any = None
        self._mode = "plain"

    def start(self, run: Start) -> None:
        from rich.console import Console

        mode = run.config.get("log", {}).get("console", "auto")
        self.console = Console(
            stderr=True, highlight=False, soft_wrap=True, force_terminal=True if mode == "rich" else None
        )
        self._mode = ("rich" if self.console.is_terminal else "plain") if mode == "auto" else mode
        self._first, self._began = run.step, time.monotonic()
        if self._mode == "rich":
            self._progress = _progress(self.console)
            self._task = self._progress.add_task("train", total=run.steps, completed=run.step, status="")
            self._progress.start()

    def log(self, record: Record) -> None:
        if self._mode == "none" or record["kind"] in ("rollback", "restart"):  # of which the user is told
            return
        if record["kind"] == "evaluation":
            several = [key.removeprefix("nats_per_token") for key in record if key.startswith("nats_per_token/")]
            for end in several or [""]:
                error = record[f"standard_error{end}"]
                known = "" if math.isnan(error) else f" +- {error:.4f}"  # of one chunk there is none
                bound = f"{record[f'nats_per_token{end}']:.4f}{known} nats per token"
                self.message(f"step {record['step']}: {end[1:] or 'validation'} {bound}")
        elif self._progress is not None:
            self._progress.update(self._task, completed=record["step"], total=record["steps"], status=status(record))
        else:
            self.message(f"step {record['step']}/{record['steps']}  {status(record)}  ETA {self._eta(record)}")

    def message(self, text: str) -> None:
        if self._mode != "none" and self.console is not None:
            self.console.print(shown(text), markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _eta(self, record: Record) -> timedelta:
        rate = (time.monotonic() - self._began) / max(1, record["step"] - self._first)
        return timedelta(seconds=round(min(rate * (record["steps"] - record["step"]), FOREVER)))


def status(record: Record) -> str:
    """The numbers of one step in a line: the unweighted nll, which scatters less than the weighted loss."""
    first = f"nll {record['nll']:.4f}" if record.get("nll") is not None else f"loss {record['loss']:.4f}"
    parts = [first, f"{record['tokens_per_second']:,.0f} tokens/s"]
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.0f} %")
    parts.append(f"memory {record['memory'] / 2**30:.2f} GB")
    return "  ".join(parts) + ("  update skipped" if record.get("skipped") else "")


def _progress(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )
