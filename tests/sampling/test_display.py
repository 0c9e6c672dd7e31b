"""What a canvas looks like."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from rich.text import Text

from unmask.sampling import continuation, infill
from unmask.sampling.display import MASK, colourless, live, picture


class Letters:
    def decode(self, token):
        return "".join(chr(ord("a") + t) for t in token)


def test_a_generation():
    canvas = continuation([0, 1], 4, 25, ends=frozenset({9}))
    assert picture(canvas, Letters()).plain == "ab" + 4 * MASK
    canvas.fill(torch.tensor([3, 2]), torch.tensor([3, 2]))
    assert picture(canvas, Letters()).plain == "abcd" + 2 * MASK
    canvas.fill(torch.tensor([4]), torch.tensor([9]))
    assert picture(canvas, Letters()).plain == "abcd"
    assert canvas.finished and canvas.answer() == [2, 3]


def test_a_hole():
    canvas = infill([[0], [5, 6]], [3], 25)
    canvas.fill(torch.tensor([2]), torch.tensor([2]))
    text = picture(canvas, Letters())
    assert text.plain == f"a{MASK}c{MASK}fg"
    assert [str(span.style) for span in text.spans] == ["dim", "yellow", "bold green", "yellow", "dim"]
    assert canvas.answer() == []


def test_without_colour_holes_are_marked(monkeypatch):
    canvas = infill([[0], [5, 6], [7]], [2, 1], 25)
    canvas.fill(torch.tensor([1]), torch.tensor([2]))
    assert picture(canvas, Letters(), marked=True).plain == f"a⟦c{MASK}⟧fg⟦{MASK}⟧h"
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Console(file=io.StringIO())
    coloured = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    assert colourless(file) and not colourless(coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    without = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)
    assert colourless(without)
    with live(Letters(), without) as report:
        report(canvas)
    assert f"⟦c{MASK}⟧" in Text.from_ansi(without.file.getvalue()).plain


def test_live_draws_every_step():
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    canvas = infill([[0], [5]], [3], 25)
    with live(Letters(), console) as report:
        report(canvas)
        canvas.fill(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]))
        report(canvas)
    assert isinstance(console.file, io.StringIO)
    assert "bcd" in console.file.getvalue()


def test_what_a_model_writes_does_not_steer_the_terminal():
    class Escapes:
        def decode(self, token):
            return "\x1b[2J" * len(token)

    canvas = infill([[0], [5]], [1], 25)
    canvas.fill(torch.tensor([1]), torch.tensor([1]))
    assert picture(canvas, Escapes()).plain == 3 * "\\x1b[2J"
