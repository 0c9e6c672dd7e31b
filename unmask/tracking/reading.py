"""Progress of a long task, on stderr: a bar with its ETA in a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

#: Seconds between plain lines.
PAUSE = 10.0


@contextmanager
def reading() -> Iterator[Callable[[int, int, int], None]]:
    """A function report(bytes read, bytes in all, documents), shown while the context lasts."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = shown = time.monotonic()
    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[documents]:,} documents"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("reading", total=None, documents=0)

        def report(read: int, total: int, documents: int) -> None:
            nonlocal shown
            progress.update(task, completed=read, total=total, documents=documents)
            now = time.monotonic()
            if not console.is_terminal and now - shown >= PAUSE:
                shown = now
                left = timedelta(seconds=round((now - began) * (total - read) / max(read, 1)))
                console.print(f"{read / max(total, 1):.0%} read, {documents:,} documents, ETA {left}")

        yield report


@contextmanager
def steps(task: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function report(done, total) for a task counted in `unit`, shown while the context lasts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = shown = time.monotonic()
    columns = (TextColumn(task), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task(task, total=None)

        def report(done: int, total: int) -> None:
            nonlocal shown
            progress.update(bar, completed=done, total=total)
            now = time.monotonic()
            if not console.is_terminal and now - shown >= PAUSE:
                shown = now
                left = timedelta(seconds=round((now - began) * (total - done) / max(done, 1)))
                console.print(f"{task}: {done} of {total} {unit}, ETA {left}")

        yield report
