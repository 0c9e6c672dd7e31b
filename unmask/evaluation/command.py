"""What `unmask eval` does: the bound of texts, answers to prompts, or tasks of lm-eval; one of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.evaluation.evaluate import describe, evaluate_sets, named
from unmask.evaluation.generation import describe_answers, generate
from unmask.evaluation.tasks import Asked, describe_tasks, evaluate_tasks
from unmask.sampling.options import Options

#: A context that gives report(done, total), for a bar on stderr; its words and its unit.
Progress = Callable[[str, str], AbstractContextManager[Callable[[int, int], None]]]
#: Options by the evaluations that read them; of the sampler: those that sample.
READ = {
    "packs": ["--data"],
    "pack_tokens": ["--data"],
    "levels": ["--data"],
    "ar": ["--data"],
    "objective": ["--data", "--generate", "--tasks"],
    "mask_token_id": ["--data", "--generate", "--tasks"],
    "draws": ["--data", "--tasks"],
    "seed": ["--data", "--tasks"],
    "limit": ["--tasks"],
    "num_fewshot": ["--tasks"],
    "include_path": ["--tasks"],
    "apply_chat_template": ["--tasks"],
}


def run(
    weights: Path,
    kinds: dict[str, Any],
    settings: dict[str, Any],
    overrides: Sequence[str],
    *,
    progress: Progress | None,
    as_json: bool = False,
) -> str:
    """What is to be printed.

    kinds: the values of --data, --generate and --tasks, one of them given; settings: the other options by name, None
    (or false) for those that were not given; overrides: of the sampler; progress: None where another process shows it.
    """
    kind = _kind(kinds)
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    for name in given:
        if kind not in READ[name]:
            raise UserError(f"eval: --{name.replace('_', '-')} is for {' and '.join(READ[name])}, not for {kind}")
    if overrides and kind == "--data":
        raise UserError(f"eval: {overrides[0]}: options of the sampler are for --generate and --tasks, not for --data")
    own = (
        {} if kind == "--data" else {name: given.pop(name) for name in ("objective", "mask_token_id") if name in given}
    )
    options = Options.read([*overrides, *(f"{name}={value}" for name, value in own.items())])
    show = progress or (lambda task, unit: nullcontext(lambda done, total: None))
    if kind == "--tasks":
        names = [name.strip() for name in kinds[kind].split(",") if name.strip()]
        return describe_tasks(evaluate_tasks(weights, Asked(names, **given), options), as_json=as_json)
    if kind == "--generate":
        with show("answering", "answers") as report:
            answers = generate(weights, kinds[kind], options, report=report)
        return describe_answers(answers, as_json=as_json)
    levels = given.pop("levels", 0)
    with show("evaluating", "packs") as report:
        found = evaluate_sets(weights, named(kinds[kind]), **given, report=report)
    return describe(found, alone=list(found) == list(kinds[kind]), levels=levels, as_json=as_json)


def _kind(kinds: dict[str, Any]) -> str:
    """The one evaluation that is asked for."""
    given = [name for name, value in kinds.items() if value]
    if len(given) != 1:
        found = f"it was given {' and '.join(given)}" if given else "it was given none"
        raise UserError(f"eval takes one of --data PATH, --generate FILE and --tasks NAME,...; {found}")
    return given[0]
