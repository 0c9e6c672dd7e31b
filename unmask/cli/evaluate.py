"""`unmask eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli import complete
from unmask.cli.app import EMA, MASK, OBJECTIVE, app, grouped, weights
from unmask.processes import launched
from unmask.terminal import say


@dataclass
class Evaluate:
    """What `eval` does, one of these."""

    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="A prepared dataset, text or JSONL; may be repeated."),
    ] = None
    generate: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts and answers, JSONL.")] = None
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...", help="Tasks of lm-eval.")] = None


@dataclass
class Measure:
    """How much `eval` measures of what."""

    packs: Annotated[int | None, typer.Option(min=0, help="Packs to evaluate of each set; 0 takes all.")] = None
    pack_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a pack (4096); longer documents are cut.")
    ] = None
    objective: Annotated[str | None, typer.Option(metavar="NAME", help=OBJECTIVE)] = None
    mask_token_id: Annotated[int | None, typer.Option(min=0, help=MASK)] = None
    draws: Annotated[
        int | None, typer.Option(min=1, help="Noise draws per chunk (1), or per answer of tasks (32).")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of the noise, and of the choice of packs and examples.")] = None
    levels: Annotated[int | None, typer.Option(min=0, help="Also by noise level, in so many bins.")] = None
    ar: Annotated[bool, typer.Option("--ar", help="Also the next-token likelihood, under causal attention.")] = False
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question of a task.")] = None
    include_path: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Task files of your own.")] = None
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Ask tasks as in a chat.")] = False


@app.command("eval")
@grouped
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its steps, or an exported folder.")],
    what: Evaluate,
    measure: Measure,
    options: Annotated[
        list[str] | None,
        typer.Argument(help="Of the sampler: length=64 ...", metavar="option=value", autocompletion=complete.options),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """The likelihood bound of texts (torchrun divides the packs), answers to held-out prompts, or tasks of lm-eval."""
    from unmask.cli.progress import steps
    from unmask.evaluation.command import run

    kinds = {f"--{name}": value for name, value in vars(what).items()}
    progress = steps if launched.rank() == 0 else None
    told = run(weights(checkpoint, ema), kinds, vars(measure), options or [], progress=progress, as_json=as_json)
    if launched.rank() == 0:
        say(told)
