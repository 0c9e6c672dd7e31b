"""A canvas as coloured text: what was given, what was filled in, the masks that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unmask.sampling.canvas import Canvas
from unmask.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MASK = "▒"
#: Around what is filled in, where no colour tells it from what was given.
MARKS = ("⟦", "⟧")


def colourless(console: Console) -> bool:
    """A file, a terminal without colours, or NO_COLOR."""
    return console.no_color or console.color_system is None


def picture(canvas: Canvas, tokenizer: Any, given: bool = True, marked: bool = False) -> Text:
    """The canvas up to the end of the answer; given: with what was not to be filled; marked: holes between MARKS."""
    from rich.text import Text

    text = Text()
    token, open_ = canvas.token.tolist(), canvas.open.tolist()
    before = 0
    for start, stop in canvas.holes:
        text.append(shown(tokenizer.decode(token[before:start])) if given else "", style="dim")
        text.append(MARKS[0] if marked else "")
        run: list[int] = []
        for position in range(start, min(stop, canvas.end)):
            if open_[position]:
                text.append(shown(tokenizer.decode(run)), style="bold green")
                text.append(MASK, style="yellow")
                run = []
            else:
                run.append(token[position])
        text.append(shown(tokenizer.decode(run)), style="bold green")
        text.append(MARKS[1] if marked else "")
        before = stop
    if given and before < len(token):
        text.append(shown(tokenizer.decode(token[before:])), style="dim")
    return text


@contextmanager
def live(tokenizer: Any, console: Console, given: bool = True) -> Iterator[Callable[[Canvas], None]]:
    """A `report` for `sample` that redraws the canvas in place after every step, and clears it at the end."""
    from rich.live import Live

    marked = given and colourless(console)
    with Live(console=console, transient=True, refresh_per_second=12, vertical_overflow="ellipsis") as view:
        yield lambda canvas: view.update(picture(canvas, tokenizer, given, marked))
