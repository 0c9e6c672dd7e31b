"""What a run is refused for before its first step: settings without effect, data with nothing to learn, a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unmask.config import Config
from unmask.errors import UserError
from unmask.objectives import Objective
from unmask.rows import Document


def check_settings(config: Config, objective: Objective) -> None:
    """Raise UserError for settings that others leave without effect."""
    training, schedule = config.training, config.schedule
    if training.steps is not None and training.epochs != _default(training, "epochs"):
        raise UserError(
            f"training.epochs={training.epochs} has no effect beside training.steps={training.steps}: "
            f"set training.steps=null, or leave epochs out"
        )
    if schedule.name == "constant" and schedule.floor != _default(schedule, "floor"):
        raise UserError(f"schedule.floor={schedule.floor} has no effect: schedule.name=constant stays at the peak")
    if config.model.mask_noise_steps and objective.decoding.kind == "causal":
        raise UserError(
            f"model.mask_noise_steps={config.model.mask_noise_steps} has no effect: "
            f"objective.name={config.objective.name} places no mask token; set it to 0"
        )


def check_warmup(config: Config, steps: int) -> None:
    """Raise UserError when a run of `steps` ends before its learning rate has reached the peak."""
    if config.schedule.warmup > max(1, steps):
        raise UserError(
            f"schedule.warmup={config.schedule.warmup:g} is longer than the run, which has {steps} steps: "
            f"give fewer, or a fraction of all steps (below 1)"
        )


def check_writable(path: Path) -> None:
    """Raise UserError when a run cannot be written to `path`; leaves nothing there."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"checkpoint.path={path}: {existing} is not a folder")
    try:  # permissions alone do not tell: not on a read-only disk, not for root, not in /proc
        TemporaryDirectory(dir=existing, prefix=".unmask-").cleanup()
    except OSError as error:
        raise UserError(f"checkpoint.path={path}: {existing} is not writable: {error.strerror}") from None


def check_targets(objective: Objective, packs: Iterable[Sequence[Document]], where: str) -> None:
    """Raise UserError unless some document of `packs` has a token that the objective scores; stops at the first."""
    try:
        exact: Any = objective.evaluation()
    except NotImplementedError:
        exact = None
    for pack in packs:
        supervised = [document for document in pack if document.supervised.any()]
        if supervised and (exact is None or len(exact.rows(supervised, 0).labelled)):
            return
    raise UserError(
        f"{where}: holds no token to learn from: every one is a prompt's, has loss_mask 0 or is the only one of its "
        f"document; give it responses or texts"
    )


def check_bound(objective: Objective) -> None:
    """Raise UserError when validation data are given for an objective that has no likelihood bound."""
    try:
        objective.evaluation()
    except NotImplementedError as error:
        raise UserError(f"data.validation: {error}: leave it out") from None


def _default(section: Any, key: str) -> Any:
    return type(section).model_fields[key].default
