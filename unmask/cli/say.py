"""What the verbs print: plain facts as JSON, or rendered for people as a sentence or as aligned columns.

A renderer takes the values that `--json` prints and returns the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unmask.errors import counted
from unmask.terminal import say

Facts = Mapping[str, Any]

#: Characters of a prompt and of an answer in a table.
SHOWN = 40
#: What `unmask doctor` says of a section without a line.
EMPTY = {"problems": "nothing required is broken", "advice": "nothing to add"}


def show(facts: Any, text: Callable[[Any], str], as_json: bool, indent: int | None = None) -> None:
    """Print facts as JSON, which has no infinities (what is not finite is null), or the text of them."""
    say(json.dumps(_finite(facts), indent=indent, allow_nan=False) if as_json else text(facts))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def listing(values: Mapping[str, str]) -> str:
    """A name and its value a line."""
    return columns([(name.replace("_", " "), value) for name, value in values.items()])


def summary(facts: Facts, again: str) -> str:
    """How a run ended; again: the command that continues one that was interrupted."""
    if facts["interrupted"] is not None:
        saved = f"saved {facts['checkpoint']}" if facts["checkpoint"] else "nothing was trained yet"
        return f"stopped at step {facts['step']} of {facts['steps']}: {saved}; continue with: {again}"
    if facts["loss"] is None:
        return f"{facts['path']} is complete at step {facts['step']}: {facts['checkpoint']}"
    return f"trained {counted(facts['step'], 'step')}, loss {facts['loss']:.4f}: {facts['checkpoint']}"


def plan(facts: Facts) -> str:
    """What a run would do, in units that a person reads."""
    return listing({name: _planned(name, value) for name, value in facts.items()})


def _planned(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_planned(name, each) for each in value)
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if "bytes" in name:
        return f"{value / 2**20:,.1f} MB"
    if name == "fill":
        return f"{100 * value:.1f} %"
    return f"{value:.3e}" if name.startswith("flops") else f"{value:,}"


def dataset(facts: Facts) -> str:
    """A prepared dataset."""
    partly = f" ({facts['supervised']:,} of them supervised)" if facts["supervised"] < facts["tokens"] else ""
    skipped = f", skipped {facts['skipped']:,} bad" if facts["skipped"] else ""
    documents, tokens = counted(facts["documents"], "document"), counted(facts["tokens"], "token")
    return f"{facts['path']}: {documents}, {tokens}{partly}{skipped}"


def evaluation(facts: Facts) -> str:
    """A bound of one set, and its noise levels, if it has them."""
    return "\n".join([_bound(facts), *(_levels(facts["levels"]) if "levels" in facts else [])])


def _bound(facts: Facts) -> str:
    error = "(one chunk: no standard error)" if facts["chunks"] < 2 else f"+- {_figure(facts['standard_error'])}"
    text = f"{facts['nats_per_token']:.4f} {error} nats per token"
    if facts["bits_per_byte"] is not None:
        text += f", {facts['bits_per_byte']:.4f} bits per byte"
    text = f"{text} ({counted(facts['tokens'], 'token')} in {counted(facts['chunks'], 'chunk')})"
    return f"{text}; next token: {_bound(facts['ar'])}" if "ar" in facts else text


def _levels(levels: Sequence[Facts]) -> list[str]:
    """The loss by noise level, a line each."""
    lines = ["  noise level    nats per masked token    blocks    tokens"]
    for level in levels:
        span = f"{level['start']:.2f} to {level['stop']:.2f}"
        error = "" if level["blocks"] < 2 else f" +- {_figure(level['standard_error'])}"
        loss = f"{_figure(level['nats_per_token'])}{error:<15}"
        lines.append(f"  {span}   {loss} {level['blocks']:>8,} {level['share']:>9.1%}")
    return lines


def _figure(value: float | None) -> str:
    """Four digits of a figure that facts give as None where it is not a number."""
    return f"{math.nan if value is None else value:.4f}"


def answers(facts: Facts) -> str:
    """The answers to held-out prompts, a line each, and their scores."""
    lines = [("", "prompt", "output", "expected")]
    for one in facts["outputs"]:
        mark = {True: "=", False: "x", None: ""}[one["exact_match"] if one["responses"] else one["contains"]]
        mark = "~" if mark == "x" and one["contains"] else mark
        prompt = one["prompt"] if isinstance(one["prompt"], str) else str(one["prompt"][-1].get("content") or "")
        lines.append((mark, _short(prompt), _short(one["output"]), _short(" | ".join(one["responses"]))))
    scores = [
        f"{name.replace('_', ' ')} {rate['value']:.1%} +- {rate['standard_error']:.1%} of {rate['samples']:,}"
        for name in ("exact_match", "contains")
        if (rate := facts[name])
    ]
    speed = f"{facts['tokens'] / max(facts['passes'], 1):.2f} tokens a forward pass"
    ended = f"{counted(facts['samples'], 'answer')}, {facts['ended']:.1%} ended by themselves, {speed}"
    return "\n".join([columns(lines), "", *scores, ended])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def tasks(facts: Facts) -> str:
    """The results of tasks, a line for each metric of each."""
    lines = [("task", "examples", "metric", "value", "standard error")]
    for task, metrics in facts["tasks"].items():
        for metric, value in metrics.items():
            if "_stderr" not in metric and isinstance(value, int | float):
                name, kept = metric.partition(" ")[::2]
                error = metrics.get(f"{name}_stderr" + (f" {kept}" if kept else ""))
                examples = str(facts["examples"].get(task, ""))
                lines.append((task, examples, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}"))
    return columns(lines)


def conversion(facts: Facts) -> str:
    """A model that was converted, and how to train it."""
    token = facts["mask_token"] or "no name, for the tokeniser has none for it, or there is none"
    return "\n".join(
        [
            f"{facts['path']}: {facts['objective']} in blocks of {facts['block_size']}",
            f"mask token {facts['mask_token_id']} ({token}): {facts['row']}",
            "next:",
            f"  unmask prepare YOUR_TEXT data/train --tokenizer {facts['path']}",
            f"  unmask prepare HELD_OUT_TEXT data/held-out --tokenizer {facts['path']}",
            f"  unmask train {facts['recipe']}",
        ]
    )


def comparison(facts: Facts) -> str:
    """Runs, a column each; rows are the figures that one of them has, and the config keys where they differ."""
    lines = [["", *(run["run"] for run in facts["runs"])]]
    for name, text in _compared(facts["by"], facts["at"]):
        cells = [text(run) for run in facts["runs"]]
        lines += [[name, *cells]] if any(cell != "-" for cell in cells) else []
    for key, values in facts["config"].items():
        lines.append([key, *("default" if value is None else str(value) for value in values)])
    return columns(lines)


def _compared(by: str, at: float | None) -> list[tuple[str, Callable[[Facts], str]]]:
    """(row's name, text of a run) in the order of the table."""
    from unmask.runs.compare import RECENT

    def number(key: str, form: str, scale: float = 1, of: str = "") -> Callable[[Facts], str]:
        def text(run: Facts) -> str:
            if run[key] is None:
                return "-"
            return format(run[key] * scale, form) + (f" (step {run[of]:,})" if of else "")

        return text

    def steps(run: Facts) -> str:
        return "-" if run["step"] is None else f"{run['step']:,} of {run['steps']:,}"

    point = f"at {by} {at:,}" if at is not None else ""
    return [
        ("step", steps),
        ("tokens", number("tokens", ",.0f")),
        (f"loss {point}, mean of {RECENT}", number("loss_at", ".4f")),
        (f"validation {point}", number("validation_at", ".4f")),
        ("loss", number("loss", ".4f")),
        (f"loss, mean of {RECENT}", number("mean_loss", ".4f")),
        ("best loss", number("best_loss", ".4f", of="best_loss_step")),
        ("validation", number("validation", ".4f")),
        ("best validation", number("best_validation", ".4f", of="best_validation_step")),
        ("tokens/s", number("tokens_per_second", ",.0f")),
        ("MFU, %", number("mfu", ".1f", 100)),
        ("memory, GB", number("memory", ".2f", 2.0**-30)),
        ("training, s", number("seconds", ",.1f")),
    ]


def machine(facts: Facts) -> str:
    """What `unmask doctor` found: a section each, then the problems and the advice."""
    lines = []
    for section, values in facts.items():
        if isinstance(values, dict):
            body = listing({name: _found(value) for name, value in values.items()}).split("\n")
        else:
            body = values or [EMPTY[section]]
        lines += [section, *(f"  {line}" for line in body)]
    return "\n".join(lines)


def _found(value: Any) -> str:
    if isinstance(value, dict) and "for" in value:  # a package or a program
        return f"{value.get('version') or value.get('path') or 'missing'}, for {value['for']}"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_found(each)}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(_found, value)) or "none"
    return "no" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
