"""The trainer's callback in the demo: it fixes the length of a run from its measured pace, and shows it live."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from unmask import Trainer
from unmask.demo.examples import Example, fill, whole
from unmask.sampling import Canvas

#: Steps whose pace is not measured (first calls are slow); the step, and the part of the time, after which the length
#: of the run is fixed.
WARM, MEASURED, PART = 3, 12, 0.1
#: The part of the time kept for the live view, where it fills holes.
SHOWN = 0.08


@dataclass
class Watch:
    """In a terminal: progress, ETA, loss, and a held-out function being unmasked; elsewhere a line now and then.

    name: of the run; seconds: it should take, and `later`: what follows it; fixed: its length is known, because it
    goes on or is a trial; examples: none where the model cannot see what comes after a hole.
    """

    name: str
    seconds: float
    console: Console
    examples: Sequence[Example] = ()
    later: float = 0.0
    fixed: bool = False
    smooth: float | None = None
    shown: int = 0
    drawing: RenderableType = field(default_factory=Text)

    def __enter__(self) -> Watch:
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[status]}")
        self._progress = Progress(*columns, console=self.console)
        self._task = self._progress.add_task(self.name, total=None, status="")
        self._live = Live(self._progress, console=self.console, refresh_per_second=8, transient=True)
        if self.console.is_terminal:
            self._live.start()
        self._began = self._next = time.monotonic()
        self._paced: tuple[int, float] | None = None  # (step, time) from which the pace is measured
        self._timed = not self.fixed
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        now, step = time.monotonic(), record["step"]
        each = self._pace(trainer, step, now)
        loss = record.get("nll", record["loss"])
        self.smooth = loss if self.smooth is None else 0.95 * self.smooth + 0.05 * loss
        if self.fixed and each is None:
            return  # the time left is not known yet
        seconds = each * (trainer.steps - step) if self.fixed and each else self.seconds - (now - self._began)
        left, of = max(0.0, seconds) + self.later, f"/{trainer.steps}" if self.fixed else ""
        status = f"loss {self.smooth:.2f}  {record.get('tokens_per_second', 0):,.0f} tokens/s  ETA {_clock(left)}"
        total = trainer.steps if self.fixed else None
        self._progress.update(self._task, completed=step, total=total, status=status)
        if now >= self._next:
            self._next = now + max(4.0, 0.035 * self.seconds)
            if not self.console.is_terminal:
                self.console.print(f"{self.name}: step {step}{of}  {status}")
            elif self.examples and self.fixed:
                self._unmask(trainer)

    def _pace(self, trainer: Trainer, step: int, now: float) -> float | None:
        """Seconds a step, once known. Gives the run the steps that fit into its time, less what the live view costs.

        The length is then kept, for the schedule's sake, unless the machine becomes so slow that it would take a
        quarter longer.
        """
        if self._paced is None:
            if step >= WARM or self.fixed:
                self._paced = (step, now)
            return None
        each, elapsed = (now - self._paced[1]) / (step - self._paced[0]), now - self._began
        if self._timed and self.fixed:
            if elapsed + each * (trainer.steps - step) > 1.25 * self.seconds:
                trainer.set_steps(step + max(1, int((self.seconds - elapsed) / each)))
        elif self._timed and (elapsed > 0.25 * self.seconds or (step >= MEASURED and elapsed > PART * self.seconds)):
            spent = SHOWN if self.examples else 0.0
            trainer.set_steps(step + max(1, int((1 - spent) * (self.seconds - elapsed) / each)))
            self.fixed = True
        return each

    def _unmask(self, trainer: Trainer) -> None:
        """Fill a hole with the model as it is, drawing every step."""
        example = self.examples[self.shown % len(self.examples)]
        self.shown += 1
        run = trainer.run

        def draw(canvas: Canvas) -> None:
            body = whole(example, canvas, run.tokenizer, self.console)
            title = f"step {trainer.step}, held out: {example.name}"
            self.drawing = Panel(body, title=title, title_align="left", border_style="dim")
            self._live.update(Group(self._progress, self.drawing), refresh=True)

        fill(run.model, run.tokenizer, run.objective.decoding, example, draw)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
