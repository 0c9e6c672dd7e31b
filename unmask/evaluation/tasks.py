"""Tasks of lm-eval: published benchmarks, or yours, by likelihood and by generation (`unmask eval --tasks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from unmask.errors import UserError
from unmask.objectives import Objective
from unmask.registry import nearest
from unmask.sampling import opening
from unmask.sampling.options import Options

#: Kinds of tasks (output_type) that need likelihoods.
LIKELIHOOD = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
#: Steps of a task that are lm-eval's and the task's own, without the model.
STEPS = ("build_all_requests", "apply_filters", "process_results", "aggregation")


@dataclass(frozen=True)
class Asked:
    """names: tasks, groups, tags, patterns (mmlu_*); limit: examples of each, None for all; num_fewshot: examples
    before every question, None for what the task says; include_path: a folder of task files beside lm-eval's own;
    apply_chat_template: put the questions into the tokeniser's; draws: None for the default; seed: of the noise and of
    the choice of examples before a question."""

    names: Sequence[str]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    apply_chat_template: bool = False
    draws: int | None = None
    seed: int = 0


def evaluate_tasks(checkpoint: str | Path, asked: Asked, options: Options | None = None) -> dict[str, Any]:
    """lm-eval's results as plain values: {"tasks": {name: {metric: value, "<metric>_stderr": ...}}, "examples",
    "versions", "draws", "seed"}. options: of the sampler, those that were given, in place of what a task says.

    Raises UserError where lm-eval is not installed, for a task that is unknown, cannot be loaded or asks for what the
    model has not.
    """
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval: pip install 'unmask[lm-eval]'")
    opening.refuse_several("eval --tasks")
    if asked.include_path is not None and not asked.include_path.is_dir():
        raise UserError(f"--include-path {asked.include_path}: no such folder of task files")
    loaded = _loaded(asked)
    _refuse_unused(asked, loaded["tasks"], options or Options())
    opened = opening.opened(checkpoint, options or Options())
    if opened.tokenizer is None:
        raise UserError(f"{checkpoint}: has no tokeniser, and tasks are texts")
    _refuse_without_bound(checkpoint, loaded["tasks"], opened.objective)
    if asked.apply_chat_template and not getattr(opened.tokenizer, "chat_template", None):
        raise UserError(f"{checkpoint}: --apply-chat-template, and its tokeniser has no chat template")
    exact = opened.objective.decoding.kind == "causal"
    if exact and asked.draws is not None:
        raise UserError(f"--draws {asked.draws} has no effect: an autoregressive model's likelihood is exact")
    from lm_eval import simple_evaluate

    from unmask.evaluation.harness import DRAWS, UnmaskLM

    given = options.model_dump(include=options.model_fields_set) if options else {}
    model = UnmaskLM(opened, asked.draws or DRAWS, asked.seed, **given)
    model.ranked = frozenset(name for name, task in loaded["tasks"].items() if _ranks(task))
    with redirect_stdout(sys.stderr):  # it remarks on its progress there
        found = simple_evaluate(
            model,
            tasks=_top(loaded),
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            apply_chat_template=asked.apply_chat_template,
            log_samples=False,
            fewshot_random_seed=asked.seed,
            task_manager=loaded["manager"],
        )
    return {
        "tasks": {name: _metrics(values) for name, values in found["results"].items()},
        "examples": {name: count["effective"] for name, count in found["n-samples"].items()},
        "versions": found["versions"],
        "draws": None if exact else model.draws,
        "seed": asked.seed,
    }


def _loaded(asked: Asked) -> dict[str, Any]:
    """The tasks with their data, as lm-eval's TaskManager loads them, and the manager."""
    from lm_eval.tasks import TaskManager

    names = list(dict.fromkeys(asked.names))
    own = None if asked.include_path is None else str(asked.include_path)
    manager = TaskManager(include_path=own, include_defaults=own is None)
    if own is not None and not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=own)  # seconds: lm-eval reads thousands of files of its own
    for name in names:
        if not manager.match_tasks([name]):
            raise UserError(
                f"--tasks {name}: no such task{nearest(name, manager.all_tasks)}; `lm_eval ls tasks` lists those of "
                f"lm-eval, --include-path FOLDER adds your own{_unreadable(asked.include_path)}"
            )
    try:
        loaded: dict[str, Any] = {**manager.load(manager.match_tasks(names)), "manager": manager}
    except Exception as error:  # whatever a task's file, its data or the network it wants raises
        raise UserError(f"--tasks {','.join(names)}: lm-eval cannot load it: {_reason(error)}") from error
    unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise UserError(f"--tasks {unsafe[0]}: it runs code that the model writes; run it with lm-eval, in a sandbox")
    for name, task in loaded["tasks"].items():
        for step in STEPS:
            setattr(task, step, _told(name, getattr(task, step), asked))
    return loaded


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _unreadable(folder: Path | None) -> str:
    """The first task file that is no YAML, which lm-eval passes over."""
    for path in sorted(folder.glob("**/*.yaml")) if folder is not None else ():
        try:
            yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            return f" ({path} cannot be read as YAML: {_reason(error)})"
    return ""


def _told(name: str, step: Callable[..., Any], asked: Asked) -> Callable[..., Any]:
    """A step of a task, whatever it raises as a UserError: its file, its data and what is asked do not go together."""

    @wraps(step)
    def told(*args: Any, **options: Any) -> Any:
        try:
            return step(*args, **options)
        except UserError:
            raise
        except Exception as error:
            how = "" if asked.num_fewshot is None else f" with --num-fewshot {asked.num_fewshot}"
            raise UserError(f"--tasks {name}: lm-eval cannot run it{how}: {_reason(error)}") from error

    return told


def _top(loaded: dict[str, Any]) -> list[Any]:
    """Loaded groups and tasks such that none is part of another."""
    inside = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
    nested = {one.name for group in loaded["groups"].values() for one in group.get_all_groups() if one is not group}
    groups = [group for name, group in loaded["groups"].items() if name not in nested]
    return [*groups, *(task for name, task in loaded["tasks"].items() if name not in inside)]


def _refuse_unused(asked: Asked, tasks: dict[str, Any], options: Options) -> None:
    """UserError for what none of the tasks reads: options of the sampler where nothing is written, draws else."""
    kinds, names = {task.get_config("output_type") for task in tasks.values()}, ",".join(asked.names)
    # Not the sampler's alone: those of the model, and guidance, which likelihoods have as well.
    given = sorted(options.model_fields_set - {"objective", "mask_token_id", "guidance"})
    if given and kinds.issubset(LIKELIHOOD):
        value = getattr(options, given[0])
        raise UserError(f"eval: {given[0]}={value} has no effect here: --tasks {names} compares likelihoods alone")
    if asked.draws is not None and kinds.isdisjoint(LIKELIHOOD):
        raise UserError(f"eval: --draws {asked.draws} has no effect here: --tasks {names} compares no likelihoods")


def _refuse_without_bound(checkpoint: str | Path, tasks: dict[str, Any], objective: Objective) -> None:
    """UserError for a task by likelihood and a model that has no bound of it."""
    scoring = [name for name, task in tasks.items() if task.get_config("output_type") in LIKELIHOOD]
    try:
        objective.evaluation()
    except NotImplementedError as error:
        if scoring:
            raise UserError(f"{checkpoint}: --tasks {scoring[0]} compares likelihoods: {error}") from None


def _ranks(task: Any) -> bool:
    """Whether a task only compares likelihoods: asking for the greedy answer too costs a pass a token."""
    metrics = getattr(task, "_metric_fn_list", {})
    return task.get_config("output_type") == "multiple_choice" and "exact_match" not in metrics


def _metrics(values: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's {"acc,none": 0.5, "acc_stderr,none": "N/A"} as {"acc": 0.5, "acc_stderr": None}."""
    found = {}
    for key, value in values.items():
        metric, sign, kept = key.partition(",")
        if sign:
            found[metric if kept == "none" else f"{metric} ({kept})"] = None if value == "N/A" else value
    return found
