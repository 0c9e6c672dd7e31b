"""torch's profiler over some steps of a run: `<run>/profile/trace-rank-0.json` opens in Perfetto or chrome://tracing.

With `log.profile.memory` also who holds the memory: on a GPU `memory-rank-0.pickle` for pytorch.org/memory_viz, every
allocation of those steps with its stack. On a CPU torch keeps no such history: there the trace holds the profiler's
allocation events, and `memory-rank-0.txt` sums them by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unmask.config import ProfileConfig
from unmask.errors import UserError

#: Allocations that a GPU's memory history holds.
HISTORY = 1_000_000


class Profile:
    """Watches the steps start .. start + steps - 1 (from 0). tell: called with a sentence when the trace is written."""

    def __init__(self, config: ProfileConfig, run: Path, rank: int, device: torch.device):
        self.config, self.device = config, device
        self.folder, self.name = run / "profile", f"rank-{rank}"
        self._profiler: Any = None
        self._first = 0

    @contextmanager
    def around(self, step: int, tell: Callable[[str], None]) -> Iterator[None]:
        """Around the step that follows `step` others."""
        wanted = self.config.start <= step < self.config.start + self.config.steps
        if wanted and self._profiler is None:
            self._first = step + 1
            self._start()
        yield
        if self._profiler is not None:
            self._profiler.step()
            if step + 1 >= self.config.start + self.config.steps:
                self.close(step + 1, tell)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if self.config.memory:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        self._profiler = profile(activities=activities, profile_memory=self.config.memory)
        self._profiler.start()

    def close(self, step: int, tell: Callable[[str], None]) -> None:
        """Write what has been watched up to `step`; nothing where nothing was."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"trace-{self.name}.json"))
            if self.config.memory:
                self._write_memory(profiler)
        except OSError as error:
            raise UserError(f"{self.folder}: the profile could not be written: {error.strerror or error}") from None
        tell(f"profile of steps {self._first} to {step}: {self.folder}")

    def _write_memory(self, profiler: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{self.name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            return
        table = profiler.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=50)
        (self.folder / f"memory-{self.name}.txt").write_text(table, encoding="utf-8")
