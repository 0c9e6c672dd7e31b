"""A canvas as coloured text: the prompt, what was generated, the masks that are left, the suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unmask.sampling.canvas import Canvas

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MASK = "▒"


def picture(canvas: Canvas, tokenizer: Any) -> Text:
    """The canvas up to the end of the answer, and the suffix of a hole."""
    from rich.text import Text

    text = Text()
    token, open_ = canvas.token.tolist(), canvas.open.tolist()
    stop = canvas.end if canvas.eos is not None else canvas.stop
    text.append(tokenizer.decode(token[: canvas.start]), style="dim")
    run: list[int] = []
    for position in range(canvas.start, stop):
        if open_[position]:
            text.append(tokenizer.decode(run), style="bold green")
            text.append(MASK, style="yellow")
            run = []
        else:
            run.append(token[position])
    text.append(tokenizer.decode(run), style="bold green")
    if canvas.suffix:
        text.append(tokenizer.decode(token[canvas.stop :]), style="dim")
    return text


@contextmanager
def live(tokenizer: Any, console: Console) -> Iterator[Callable[[Canvas], None]]:
    """A `report` for `sample` that redraws the canvas in place after every step, and clears it at the end."""
    from rich.live import Live

    with Live(console=console, transient=True, refresh_per_second=12, vertical_overflow="ellipsis") as view:
        yield lambda canvas: view.update(picture(canvas, tokenizer))
