"""TensorBoard: event files in `<run>/tensorboard`; `tensorboard --logdir runs` shows every run below `runs`.

Scalars are written in double precision and flushed one by one, as the log's lines are. A run that goes on tells the
reader to forget what was written from its step on (a session start event), and writes that step again from the log.
"""

from __future__ import annotations

import time as clock
from pathlib import Path
from typing import Any

from unmask.config import Section
from unmask.tracking import Start
from unmask.tracking.following import Following


class Options(Section):
    #: Folder of the event files; empty: `tensorboard` in the run's folder.
    folder: str | None = None


class TensorBoard(Following):
    """Writes through torch.utils.tensorboard."""

    Options = Options
    package = "tensorboard"

    def open(self, run: Start, anew: bool) -> dict[str, int]:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.options.folder) if self.options.folder else run.path / "tensorboard"
        there = list(folder.glob("events.out.tfevents.*"))
        _wait_after(there)
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.step if there else None)
        return dict.fromkeys(("step", "evaluation"), run.step - 1 if there else -1)

    def write(self, step: int, numbers: dict[str, float], time: float | None) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, time, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _wait_after(files: list[Path]) -> None:
    """Until a new event file sorts behind those that are there: readers take them in the order of their names, which
    begin with a second and go on with process and counter."""
    seconds = [int(part) for file in files if (part := file.name.split(".")[3]).isdecimal()]
    left = max(seconds, default=0) + 1 - clock.time()
    if 0 < left <= 1:
        clock.sleep(left)
