"""`unmask train` and `unmask inspect`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.app import Json, Overrides
from unmask.cli.say import plan, show, summary
from unmask.errors import UserError
from unmask.processes import launched

if TYPE_CHECKING:
    from unmask.config import Config


@dataclass
class Launch:
    """How many processes `train` starts."""

    nproc: Annotated[
        str | None,
        typer.Option(metavar="N", help="Processes to start on this machine; auto: one per GPU, else `parallel`."),
    ] = None
    restarts: Annotated[
        int, typer.Option(min=0, help="With --nproc: how often to restart automatically from the last checkpoint.")
    ] = 0
    restarted: Annotated[str | None, typer.Option(hidden=True)] = None


def train(
    launch: Launch,
    config: Annotated[str | None, typer.Argument(help="YAML file of the run.", metavar="CONFIG")] = None,
    overrides: Overrides = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Repeat a run as its folder records it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --from: folder of the new run, else RUN-again.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report what would be trained; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model, or resume an interrupted run."""
    from unmask.runs.record import given

    settings, repeat = given(config, overrides or [], source, out)
    if launch.nproc is not None or launch.restarts:
        size = _processes(settings, launch)
        if not dry_run and (size > 1 or launch.restarts):
            _launch(size, launch.restarts, [config, *(overrides or [])], {"from": source, "out": out}, as_json)
    if dry_run:
        from unmask.planning.dry_run import plan as planned

        show(planned(settings), plan, as_json, indent=1)
        return
    from unmask.training.trainer import Trainer

    trainer = Trainer(config=settings, repeat=repeat)
    trainer.restarted = launch.restarted
    ended = trainer.train()
    again = " ".join(["unmask train", shlex.quote(str(ended.path / "config.yaml")), *launched.options()])
    if launched.rank() == 0:
        show(ended.facts(), lambda facts: summary(facts, again), as_json)
    if ended.interrupted is not None:
        raise typer.Exit(128 + ended.interrupted)


def _processes(settings: Config, launch: Launch) -> int:
    """How many processes to start; UserError for what cannot be started here."""
    from unmask.config import rules
    from unmask.parallel.stages import resolved
    from unmask.processes.launch import size_of

    if launch.nproc is None:
        raise UserError("--restarts is for processes that are started here: give --nproc too")
    rules.check(rules.Known(resolved(settings), restarts=launch.restarts))
    return size_of(launch.nproc, settings.parallel)


def _launch(size: int, restarts: int, words: list[str | None], options: dict[str, Path | None], as_json: bool) -> None:
    """Train as `size` processes, and end as they do."""
    from unmask.processes.launch import launch

    arguments = ["train", *filter(None, words), *(["--json"] if as_json else [])]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)] if value is not None else []
    raise typer.Exit(launch(arguments, size, restarts))


def inspect(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Overrides = None,
    placement: Annotated[
        bool, typer.Option("--placement", help="Which rank computes which rows of the first pack.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of every pack of the first step.")] = False,
) -> None:
    """Draw how a run would be divided over ranks; one process is enough."""
    from unmask.config import Config
    from unmask.planning.dry_run import inspect as look

    if not placement:
        raise UserError("say what to inspect: --placement")
    drawing, found = look(Config.load(config, overrides))
    show(found, lambda _: drawing, as_json)
