"""`unmask eval`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli import complete
from unmask.cli.app import Checkpoint, Ema, Json, MaskTokenId, ObjectiveName, weights
from unmask.cli.say import answers, evaluation, show, tasks
from unmask.errors import UserError
from unmask.processes import launched

if TYPE_CHECKING:
    from unmask.sampling.options import Options

#: Facts and what renders them.
Result = tuple[dict[str, Any], Callable[[Any], str]]

KINDS = ("data", "generate", "tasks")
#: Options by the evaluations that read them; all read the others.
READ = {
    **dict.fromkeys(("packs", "pack_tokens", "levels", "ar"), ("data",)),
    **dict.fromkeys(("draws", "seed"), ("data", "tasks")),
    **dict.fromkeys(("limit", "num_fewshot", "include_path", "apply_chat_template"), ("tasks",)),
}


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

    packs: Annotated[int | None, typer.Option(min=0, help="Packs to evaluate of each set; 0: all.")] = None
    pack_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a pack (4096); longer documents are cut.")
    ] = None
    objective: ObjectiveName = None
    mask_token_id: MaskTokenId = None
    draws: Annotated[
        int | None, typer.Option(min=1, help="Noise draws per chunk (1), or per answer of tasks (32).")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the noise, and of the choice of packs and examples.")] = None
    levels: Annotated[int | None, typer.Option(min=0, help="Also by noise level, in this many bins.")] = None
    ar: Annotated[bool, typer.Option("--ar", help="Also the exact causal next-token likelihood.")] = False
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question of a task.")] = None
    include_path: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder of your own task files.")] = None
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Use the chat template.")] = False


def evaluate(
    checkpoint: Checkpoint,
    what: Evaluate,
    measure: Measure,
    options: Annotated[
        list[str] | None,
        typer.Argument(help="Sampler options: length=64 ...", metavar="option=value", autocompletion=complete.options),
    ] = None,
    ema: Ema = False,
    as_json: Json = False,
) -> None:
    """The likelihood bound of texts (torchrun divides the packs), answers to held-out prompts, or tasks of lm-eval."""
    kind = _kind(what)
    given = _given(kind, measure, options or [])
    facts, text = _RUN[kind](weights(checkpoint, ema), what, given, options or [])
    if launched.rank() == 0:
        show(facts, text, as_json)


def _kind(what: Evaluate) -> str:
    """The one evaluation that is asked for."""
    given = [name for name, value in vars(what).items() if value]
    if len(given) != 1:
        found = f"it was given {' and '.join(f'--{name}' for name in given)}" if given else "it was given none"
        raise UserError(f"eval takes one of --data PATH, --generate FILE and --tasks NAME,...; {found}")
    return given[0]


def _given(kind: str, measure: Measure, options: list[str]) -> dict[str, Any]:
    """What was given of the options in `Measure`; UserError for one that this evaluation does not read."""
    given = {name: value for name, value in vars(measure).items() if value is not None and value is not False}
    for name in given:
        if kind not in READ.get(name, KINDS):
            kinds = " and ".join(f"--{each}" for each in READ[name])
            raise UserError(f"eval: --{name.replace('_', '-')} is for {kinds}, not for --{kind}")
    if options and kind == "data":
        raise UserError(f"eval: {options[0]}: options of the sampler are for --generate and --tasks, not for --data")
    return given


def _data(path: Path, what: Evaluate, given: dict[str, Any], _: list[str]) -> Result:
    from unmask.cli.progress import steps
    from unmask.evaluation import evaluate_sets, named

    data, levels = what.data or [], given.pop("levels", 0)
    with steps("evaluating", "packs") if launched.rank() == 0 else nullcontext() as report:
        measured = evaluate_sets(path, named(data), **given, report=report)
    facts = {name: one.asdict(levels) for name, one in measured.items()}
    if list(facts) == data and len(data) == 1:  # one set needs no name
        return facts[data[0]], evaluation
    return facts, lambda sets: "\n".join(f"{name}: {evaluation(one)}" for name, one in sets.items())


def _generate(path: Path, what: Evaluate, given: dict[str, Any], options: list[str]) -> Result:
    from unmask.cli.progress import steps
    from unmask.evaluation import generate

    assert what.generate is not None
    with steps("answering", "answers") as report:
        return generate(path, what.generate, _options(given, options), report=report), answers


def _tasks(path: Path, what: Evaluate, given: dict[str, Any], options: list[str]) -> Result:
    from unmask.evaluation import Asked, evaluate_tasks

    names = [name.strip() for name in (what.tasks or "").split(",") if name.strip()]
    sampler = _options(given, options)
    return evaluate_tasks(path, Asked(names, **given), sampler), tasks


def _options(given: dict[str, Any], options: list[str]) -> Options:
    """The sampler's options, with those of the model, which leave `given`."""
    from unmask.sampling.options import Options

    model = [f"{name}={given.pop(name)}" for name in ("objective", "mask_token_id") if name in given]
    return Options.read([*options, *model])


#: What carries an evaluation out: (weights, what, options given, options of the sampler) to facts and their renderer.
_RUN = {"data": _data, "generate": _generate, "tasks": _tasks}
