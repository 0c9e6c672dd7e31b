"""Held-out functions with a hole, and filling it before one's eyes."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unmask import load as open_run
from unmask.errors import counted
from unmask.sampling import Canvas, sample
from unmask.sampling.display import colourless, picture


@dataclass(frozen=True)
class Example:
    """A held-out function: token ids before, in and after a hole of whole lines, and where it is from."""

    name: str
    prefix: list[int]
    hole: list[int]
    suffix: list[int]


def examples_from(files: Sequence[Path], tokenizer: Any, count: int = 6) -> list[Example]:
    """Short top-level functions of `files`, one a file, with a hole of one or two lines."""
    found: list[Example] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and 5 <= (node.end_lineno or 0) - node.lineno <= 16:
                source = "".join(lines[node.lineno - 1 : node.end_lineno])
                example = _with_hole(f"{path.parent.name}/{path.name}: {node.name}", source, node, tokenizer)
                if example is not None:
                    found.append(example)
                    break
    return found[:count]


def _with_hole(name: str, source: str, node: ast.FunctionDef, tokenizer: Any) -> Example | None:
    """The hole is the first simple statement, not the first nor the last of the body, of a useful size."""
    coded = tokenizer(source, add_special_tokens=False, return_offsets_mapping=True)
    token, offsets = coded["input_ids"], coded["offset_mapping"]
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in node.body[1:-1]:
        first = starts[statement.lineno - node.lineno] + statement.col_offset
        last = starts[(statement.end_lineno or statement.lineno) - node.lineno] + (statement.end_col_offset or 0)
        inside = [i for i, (begin, end) in enumerate(offsets) if end > first and begin < last]
        if isinstance(statement, ast.Assign | ast.Return | ast.Expr | ast.If) and 5 <= len(inside) <= 28:
            begin, end = inside[0], inside[-1] + 1
            return Example(name, token[:begin], token[begin:end], token[end:])
    return None


def fill(model: Any, tokenizer: Any, decoding: Any, example: Example, report: Callable[[Canvas], None]) -> Any:
    return sample(
        model,
        tokenizer,
        example.prefix,
        suffix=example.suffix,
        decoding=decoding,
        length=len(example.hole),
        report=report,
    )


def show_infilling(out: Path, examples: Sequence[Example], console: Console, count: int = 3) -> bool:
    """Open the run's folder as a user would, and fill a few holes before one's eyes; False after Ctrl-C."""
    opened = open_run(out)
    for example in examples[:count]:
        console.rule(example.name)
        with Live(console=console, auto_refresh=False, transient=True) as view:

            def draw(canvas: Canvas, view: Live = view) -> None:
                view.update(whole(example, canvas, opened.tokenizer, console), refresh=True)  # noqa: B023
                if console.is_terminal:
                    time.sleep(0.05)

            result = fill(opened.model, opened.tokenizer, opened.objective.decoding, example, draw)
        console.print(whole(example, result.canvas, opened.tokenizer, console))
        same = sum(ours == theirs for ours, theirs in zip(result.token, example.hole, strict=False))
        original = opened.tokenizer.decode(example.hole).strip()
        console.print(Text(f"the original: {original}", style="italic"))
        passes = f"{result.passes} forward pass{'' if result.passes == 1 else 'es'}"
        console.print(f"{same} of {counted(len(example.hole), 'token')} as there; {passes}\n")
        if result.interrupted:
            return False
    return True


def whole(example: Example, canvas: Canvas, tokenizer: Any, console: Console) -> Text:
    """The function, with what the sampler left out at its front, as `console` can tell the hole from it."""
    front = Text(tokenizer.decode(example.prefix[: canvas.dropped]), style="dim")
    return front + picture(canvas, tokenizer, marked=colourless(console))
