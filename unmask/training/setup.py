"""From a config to a run that can start, refusing bad input before the first step.

    settings   what the config says, without data          objective, device, folder
    data       the data, opened                            tokeniser, source of rows
    run        the model, its weights perhaps unread       bound objective, held-out data, length

Each step needs the one before, and nothing of the next: a dry run ends with the last, an engine reads the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask import tracking
from unmask.attention.plan import choose_backend
from unmask.config import Config, rules
from unmask.config.rules import Known
from unmask.data.beginnings import begin_with
from unmask.data.prepare import with_template
from unmask.engine.engine import row_model_of
from unmask.engine.optim import low_precision, masters
from unmask.engine.optim.optimizers import optimizers
from unmask.engine.optim.schedules import schedules
from unmask.engine.precision import Precision
from unmask.errors import UserError
from unmask.hardware import default_device
from unmask.hf import vocabulary_of
from unmask.models import LoadedModel, RowModel, dropout, load, routing
from unmask.models.decoder import spec_of
from unmask.models.families.materialise import is_unread, needs_whole
from unmask.objectives import Objective
from unmask.objectives import build as build_objective
from unmask.parallel import apply
from unmask.runs.folder import newest, step_of
from unmask.runs.identity import Identity
from unmask.training import datasets, own_objective, refusals
from unmask.training.source import Packs, Source

if TYPE_CHECKING:
    from unmask.rows import Document


@dataclass(frozen=True)
class Settings:
    """What a config asks for. known: of it, for rules; objective: bound to no model yet; said: what should be said of
    choices that were made."""

    config: Config
    known: Known
    path: Path
    device: torch.device
    objective: Objective
    said: list[str]


@dataclass(frozen=True)
class Data:
    """tokenizer: None for token ids, which the model's own may still explain; validation: as it was given."""

    tokenizer: Any
    source: Source
    validation: Any


@dataclass
class Run:
    """One run, ready for an engine: `config` with the arguments of `Trainer.train` in it."""

    config: Config
    path: Path
    device: torch.device
    loaded: LoadedModel
    row_model: RowModel
    objective: Objective
    source: Source
    #: Name -> packs of every validation set; one that was given without a name is called "validation".
    validation: dict[str, list[list[Document]]]
    steps: int
    #: Of the whole model's parameters, by name.
    shapes: dict[str, list[int]]
    #: Whether the model's weights are still to be read, by each process what it holds of them.
    in_parts: bool
    #: Of the objective and the model: where they are from.
    said: list[str]

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @property
    def precision(self) -> Precision:
        return Precision.of(self.config, self.device)

    @property
    def identity(self) -> Identity:
        """What must be unchanged for the run to be resumed exactly."""
        return Identity(
            *(self.path, self.config, self.device, self.objective),
            *(self.model.config, self.shapes, self.source.fingerprint()),
        )

    def notes(self) -> list[str]:
        """What whoever starts the run should know."""
        evaluation = self.config.evaluation
        unused = [] if self.validation else [
            f"evaluation.{key}={getattr(evaluation, key)} has no effect: data.validation is empty"
            for key in evaluation.given()
        ]  # fmt: skip
        whole = self.config.model.name
        if whole and divides(self.config) and not (self.in_parts or needs_whole(self.config.model.lora)):
            unused.append(
                f"model.name={whole}: loaded whole by every process before it keeps its part (the documentation of "
                f"models says which are)"
            )
        notes = [*masters.notes(self.model), *dropout.notes(self.model)]
        return [*self.said, *unused, *notes, *self.source.notes(self.tokenizer)]


def prepare(config: Config, train: Any = None, validation: Any = None) -> Run:
    """All three steps. `train` and `validation` stand in for the config's paths."""
    chosen = settings(config, config.data.validation is not None or validation is not None)
    return run(chosen, data(chosen, train, validation))


def settings(config: Config, validation: bool) -> Settings:
    """Check what the config says by itself. validation: whether there are held-out data."""
    config, of_run = _of_run(config)
    config, said = own_objective.chosen(config)
    objective = build_objective(config.objective.chosen, config.objective.options())
    device = device_of(config)
    known = Known(config, objective=objective, device=device.type, validation=validation)
    rules.check(known)
    optimizers[config.optimizer.name]
    schedules[config.schedule.name]
    tracking.check(config.log)
    path = Path(config.checkpoint.path)
    refusals.check_writable(path)
    newest(path, config.checkpoint.step)
    choose_backend(config.model.attention, device)
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.training.seed)
    return Settings(config, known, path, device, objective, [*of_run, *said])


def data(chosen: Settings, train: Any = None, validation: Any = None) -> Data:
    """Open the training data, or take a source of rows as it is."""
    config = chosen.config
    train = config.data.train if train is None else train
    validation = config.data.validation if validation is None else validation
    if train is None:
        raise UserError("there is nothing to train on: give data.train a prepared dataset, a text folder or JSONL")
    listed = [] if isinstance(train, Source) else datasets.listed(train)
    datasets.check_raw(config, [*(each for _, each, _ in listed), *datasets.named(validation).values()], chosen.known)
    tokenizer = datasets.tokenizer_of(config, [each for _, each, _ in listed])
    tokenizer = with_template(tokenizer, config.data.chat_template)
    tokenizer = begin_with(tokenizer, config.data.bos if tokenizer is not None else "auto", "data.bos")
    source = train if isinstance(train, Source) else Packs(datasets.mixture(config, listed, tokenizer), config)
    return Data(tokenizer, source, validation)


def run(chosen: Settings, of: Data) -> Run:
    """Load the model, bind the objective to it, and check that all three fit."""
    config = chosen.config
    loaded = load(
        config.model,
        of.tokenizer,
        seed=config.training.seed,
        device=chosen.device,
        vocab_size=None if of.tokenizer is None else vocabulary_of(of.tokenizer),
        unread=True,
    )
    if of.tokenizer is None:
        loaded = loaded._replace(tokenizer=begin_with(loaded.tokenizer, config.data.bos, "data.bos"))
    steps = config.training.steps or of.source.steps(config.training.epochs)
    rules.check(replace(chosen.known, steps=steps, decoder=spec_of(loaded.model)))
    objective = chosen.objective.bind(loaded.model, loaded.tokenizer, loaded.mask_token_id)
    of.source.check(loaded, objective)
    validation = datasets.held_out(config, of.validation, loaded, objective)
    low_precision.check(config, loaded.model)
    row_model = row_model_of(loaded, config)
    apply.check(config.parallel, row_model)
    routing.check(loaded.model, {f"model.{key}": getattr(config.model, key) for key in ("balance_loss", "z_loss")})
    return Run(
        config=config,
        path=chosen.path,
        device=chosen.device,
        loaded=loaded,
        row_model=row_model,
        objective=objective,
        source=of.source,
        validation=validation,
        steps=steps,
        shapes={name: list(parameter.shape) for name, parameter in loaded.model.named_parameters()},
        in_parts=divides(config) and is_unread(loaded.model),
        said=chosen.said,
    )


def _of_run(config: Config) -> tuple[Config, list[str]]:
    """The config with the step that a run's folder stands for as its model, and what should be said of that."""
    name = config.model.name
    step = None if name is None else step_of(Path(name))
    if step is None or str(step) == name:
        return config, []
    model = config.model.model_copy(update={"name": str(step)})
    return config.model_copy(update={"model": model}), [f"model.name={name}: a run, whose model at {step} is taken"]


def divides(config: Config) -> bool:
    """Whether a process is to hold a part of the model only."""
    parallel = config.parallel
    sizes = parallel.model_parallel_size, parallel.pipeline_stages, parallel.expert_parallel_size
    return max(sizes) > 1 or (bool(parallel.level) and parallel.shards > 1)


def device_of(config: Config) -> torch.device:
    """The device of this process: of several on one machine, each takes the GPU of its number."""
    name = config.training.device
    if name == "auto" or (name == "cuda" and torch.cuda.is_available()):
        name = default_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"training.device={name}: no such device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"training.device={name}: unmask trains on cpu and cuda (which includes ROCm)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"training.device={name}: this torch sees no GPU; use cpu or auto")
    return device
