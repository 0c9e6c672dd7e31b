"""The verbs around a run: compare, doctor, recipes, completion, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmask.cli import complete
from unmask.cli.app import Json
from unmask.cli.say import columns, comparison, machine, show
from unmask.errors import UserError
from unmask.terminal import say


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their YAML files.", metavar="RUN")],
    by: Annotated[str, typer.Option(help="Where to compare losses: at equal `step` or equal `tokens`.")] = "step",
    as_json: Json = False,
) -> None:
    """Runs side by side: where their configs differ, losses at the same point, speed and memory."""
    from unmask.runs.compare import compare as compared

    show(compared(runs, by), comparison, as_json, indent=1)


def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder whose disk is measured.")] = Path("."),
    as_json: Json = False,
) -> None:
    """What this machine can do, what is missing, and whether a training step works on it (exit code 1 if not)."""
    from unmask.doctor import examine

    facts = examine(folder)
    show(facts, machine, as_json, indent=1)
    if facts["problems"]:
        raise typer.Exit(1)


def recipes(
    name: Annotated[str | None, typer.Argument(help="The recipe to print.", autocompletion=complete.recipes)] = None,
    write: Annotated[Path | None, typer.Option(help="Write it to this file instead.", metavar="FILE")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print {name: what it is for}.")] = False,
) -> None:
    """Configs of the commonest jobs: list them, or make one yours with `unmask recipes NAME > run.yaml`."""
    from unmask import recipes as shipped

    if name is None and write is not None:
        raise UserError(f"name the recipe to write to {write}: unmask recipes lists them")
    if name is None:
        listed = {each: shipped.summary(each) for each in shipped.names()}
        show(listed, lambda facts: columns(list(facts.items())), as_json, indent=1)
    elif write is not None:
        shipped.write(name, write, force=force)
        say(write)
    else:
        say(shipped.text(name), end="")


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print the completion script of a shell: `source <(unmask completion bash)`."""
    print(complete.script(shell))


def demo(
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of training.")] = 6.0,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("unmask-demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and data order.")] = 0,
    steps: Annotated[int | None, typer.Option(hidden=True)] = None,
    layers: Annotated[int, typer.Option(hidden=True)] = 2,
    files: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Train a small model on this Python's own source code, and watch it fill holes in functions."""
    from unmask.demo import Settings, run

    interrupted = run(Settings(minutes=minutes, out=out, seed=seed, steps=steps, layers=layers, files=files))
    if interrupted is not None:
        raise typer.Exit(128 + interrupted)
