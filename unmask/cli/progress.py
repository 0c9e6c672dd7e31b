"""Progress of a long task, on stderr: a bar with its ETA in a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from unmask.errors import counted

#: Seconds between plain lines.
PAUSE = 10.0


@contextmanager
def reading() -> Iterator[Callable[[int, int, int], None]]:
    """A function report(bytes read, bytes in all, documents), shown while the context lasts."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    count = TextColumn("{task.fields[documents]}")
    with _progress(BarColumn(), DownloadColumn(), count, TimeRemainingColumn()) as show:
        yield lambda read, total, documents: show(
            read, total, f"{read / max(total, 1):.0%} read", counted(documents, "document")
        )


@contextmanager
def steps(task: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function report(done, total) for a task counted in `unit`, shown while the context lasts."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(task), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with _progress(*columns) as show:
        yield lambda done, total: show(done, total, f"{task}: {done} of {total} {unit}")


@contextmanager
def _progress(*columns: Any) -> Iterator[Callable[..., None]]:
    """A function show(done, total, line, documents): a bar of these columns, or the line and its ETA."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = shown = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=None, documents="")

        def show(done: int, total: int, line: str, documents: str = "") -> None:
            nonlocal shown
            progress.update(bar, completed=done, total=total, documents=documents)
            now = time.monotonic()
            if not console.is_terminal and now - shown >= PAUSE:
                shown = now
                line = f"{line}, {documents}" if documents else line
                console.print(f"{line}, ETA {timedelta(seconds=round((now - began) * (total - done) / max(done, 1)))}")

        yield show
