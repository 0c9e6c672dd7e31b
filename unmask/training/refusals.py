"""What a run is refused for before its first step: settings without effect, data with nothing to learn, a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from unmask.config import Config
from unmask.config.overrides import MUON, OF_SCHEDULE
from unmask.data.mixing import NOTHING
from unmask.engine.noise_scale import measurable
from unmask.engine.schedules import in_steps
from unmask.errors import UserError, counted
from unmask.models import lora
from unmask.objectives import Objective
from unmask.objectives.base import needs_mask
from unmask.rows import Document

if TYPE_CHECKING:
    from unmask.data import Dataset

#: Tokens of a dataset that are searched for the mask token before the first step.
SCANNED = 1 << 28


def check_settings(config: Config, objective: Objective) -> None:
    """Raise UserError for settings that others leave without effect."""
    training = config.training
    if training.steps is not None and training.epochs != _default(training, "epochs"):
        raise UserError(
            f"training.epochs={training.epochs} has no effect beside training.steps={training.steps}: "
            f"leave one of them out (~training.steps, ~training.epochs)"
        )
    _check_names(config)
    lora.check_config(config)
    if training.offload_activations and training.checkpointing not in ("full", "selective"):
        raise UserError(
            f"training.offload_activations=true has no effect with training.checkpointing={training.checkpointing}: "
            f"use full or selective, whose kept activations it moves"
        )
    if training.offload_activations and config.model.compile:
        raise UserError("training.offload_activations=true does not go with model.compile=true: leave one of them out")
    if config.model.mask_noise_steps and not objective.places_mask:
        raise UserError(
            f"model.mask_noise_steps={config.model.mask_noise_steps} has no effect: "
            f"objective.name={config.objective.chosen} places no mask token; set it to 0"
        )
    if config.evaluation.ar and objective.decoding.kind in ("causal", "canvas"):
        why = (
            "the bound is that already" if objective.decoding.kind == "causal" else "its encoder has a loss of its own"
        )
        raise UserError(
            f"evaluation.ar=true has no effect with objective.name={config.objective.chosen}: {why}; leave it out"
        )
    for key in ("balance_loss", "z_loss"):
        value, stages = getattr(config.model, key), config.parallel.pipeline_stages
        if value and (config.model.compile or stages > 1):
            other = f"parallel.pipeline_stages={stages}" if stages > 1 else "model.compile=true"
            raise UserError(f"model.{key}={value:g} does not go with {other}: set model.{key} to 0, or do without it")
    _check_spike(config)
    reason = measurable(config)
    if config.log.noise_scale is True and reason is not None:
        raise UserError(f"log.noise_scale=true: it cannot be measured here: {reason}; use auto or false")
    profile = config.log.profile
    if not profile.steps and (profile.memory or profile.start != _default(profile, "start")):
        raise UserError("log.profile: nothing is watched with log.profile.steps=0: give the number of steps to watch")


def _check_names(config: Config) -> None:
    """Keys that the chosen optimiser or schedule does not read; those of a plug-in are its own business."""
    optimizer, schedule = config.optimizer, config.schedule
    for key in MUON if optimizer.name == "adamw" else ():
        if getattr(optimizer, key) != _default(optimizer, key):
            raise UserError(f"optimizer.{key}={getattr(optimizer, key)} has no effect: optimizer.name=adamw; use muon")
    for key, readers in OF_SCHEDULE.items() if schedule.name in ("cosine", "linear", "constant", "wsd") else ():
        if schedule.name not in readers and getattr(schedule, key) != _default(schedule, key):
            raise UserError(
                f"schedule.{key}={getattr(schedule, key)} has no effect: schedule.name={schedule.name} does not read "
                f"it, {' and '.join(readers)} do{'es' if len(readers) == 1 else ''}"
            )


def _check_spike(config: Config) -> None:
    spike = config.training.spike
    if not spike.factor:
        for key in ("window", "rollbacks"):
            if getattr(spike, key) != _default(spike, key):
                raise UserError(f"training.spike.{key}={getattr(spike, key)} has no effect: training.spike.factor is 0")
        return
    if spike.factor <= 1:
        raise UserError(
            f"training.spike.factor={spike.factor:g}: every other loss would be a spike; give a factor above 1, or 0"
        )
    if not config.checkpoint.every:
        raise UserError("training.spike.factor needs checkpoints to go back to: set checkpoint.every")


def check_device(config: Config, device: torch.device) -> None:
    """Raise UserError for settings that have no effect on `device`."""
    if config.training.offload_activations and device.type == "cpu":
        raise UserError(
            "training.offload_activations=true has no effect on a CPU, whose memory it would move activations to"
        )


def check_evaluation(config: Config, validation: Any) -> None:
    """Raise UserError for settings that need validation data, or averaged weights, and do not have them."""
    if isinstance(validation, dict) and not validation:
        raise UserError("data.validation: names no set; give {name: path, ...}, or leave it out")
    if config.checkpoint.best and validation is None:
        raise UserError("checkpoint.best goes by the likelihood bound: give data.validation")
    if not config.evaluation.ema and not config.training.ema:
        raise UserError("evaluation.ema=false has no effect: training.ema=0 keeps no averaged weights")


def check_steps(config: Config, steps: int) -> None:
    """Raise UserError for what does not fit into a run of `steps`."""
    schedule, profile = config.schedule, config.log.profile
    if schedule.warmup > max(1, steps):
        raise UserError(
            f"schedule.warmup={schedule.warmup:g} is longer than the run, which has {counted(steps, 'step')}: "
            f"give fewer, or a fraction of all steps (below 1)"
        )
    if schedule.name == "wsd" and in_steps(schedule.warmup, steps) + in_steps(schedule.decay, steps) > max(1, steps):
        raise UserError(
            f"schedule.warmup={schedule.warmup:g} and schedule.decay={schedule.decay:g} are longer than the run, which "
            f"has {counted(steps, 'step')}: give fewer, or fractions of all steps (below 1)"
        )
    if profile.steps and profile.start + profile.steps > steps:
        raise UserError(
            f"log.profile watches steps {profile.start + 1} to {profile.start + profile.steps}, and the run has "
            f"{steps}: give a smaller log.profile.start or fewer log.profile.steps"
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
    raise UserError(f"{where}: {NOTHING}")


def check_mask(objective: Objective, dataset: Dataset, where: str) -> None:
    """Raise UserError where the model would learn to predict the mask token. What lies further back than SCANNED is
    found when its step comes."""
    if not objective.places_mask:
        return
    mask = needs_mask(objective)
    number = dataset.learns(mask, SCANNED)
    if number is not None:
        raise UserError(
            f"{where}: document {number} holds the mask token (id {mask}), which only noise may place: prepare it "
            f"again without, or choose another model.mask_token_id"
        )


def check_bound(objective: Objective) -> None:
    """Raise UserError when validation data are given for an objective that has no likelihood bound."""
    try:
        objective.evaluation()
    except NotImplementedError as error:
        raise UserError(f"data.validation: {error}: leave it out") from None


def _default(section: Any, key: str) -> Any:
    return type(section).model_fields[key].default
