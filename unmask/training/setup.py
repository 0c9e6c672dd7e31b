"""From a config to everything a run needs, refusing bad input before the first step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask import tracking
from unmask.config import Config, DataConfig, SourceConfig, rules
from unmask.config.rules import Known
from unmask.data import Dataset, Mixture, Packs, Reading, Sampler, Source, dataset_from, load_tokenizer, open_dataset
from unmask.data.beginnings import begin_with, beginning, shown
from unmask.data.prepare import with_template
from unmask.data.sources import exists, is_dataset
from unmask.engine import low_precision, masters
from unmask.engine.optimizers import optimizers
from unmask.engine.schedules import schedules
from unmask.errors import UserError
from unmask.hardware import default_device
from unmask.hf import fetching, vocabulary_of
from unmask.models import LoadedModel, RowModel, dropout, load, routing
from unmask.models.decoder import decoder_layers, spec_of
from unmask.models.families.materialise import fill, is_unread, needs_whole, stand_ins
from unmask.models.positions import check_positions
from unmask.objectives import Objective
from unmask.objectives import build as build_objective
from unmask.parallel import apply, stages
from unmask.runs.folder import newest, step_of
from unmask.runs.identity import Identity
from unmask.runs.resume import LEFT_OUT
from unmask.training import own_objective, refusals
from unmask.training.batches import micro_batches

if TYPE_CHECKING:
    from unmask.rows import Document

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """One run, ready to start: `config` with the arguments of `Trainer.train` in it."""

    config: Config
    path: Path
    device: torch.device
    model: Any
    row_model: RowModel
    tokenizer: Any
    objective: Objective
    packs: Mixture
    sampler: Sampler
    #: Name -> packs of every validation set; one that was given without a name is called "validation".
    validation: dict[str, list[list[Document]]]
    steps: int
    #: Of the whole model's parameters, by name.
    shapes: dict[str, list[int]]
    #: Whether each process reads its part of the model's weights, and no more, when it knows it (`fill`).
    in_parts: bool
    #: Of the objective: where it is from.
    said: list[str]

    @property
    def autocast(self) -> bool:
        return self.config.training.precision != "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        if self.autocast:
            return PRECISIONS[self.config.training.precision]
        return getattr(torch, self.config.model.dtype)

    def arithmetic(self) -> torch.autocast:
        """The context that the model runs in."""
        return torch.autocast(self.device.type, dtype=self.dtype if self.autocast else None, enabled=self.autocast)

    def notes(self) -> list[str]:
        """What whoever starts the run should know about its data."""
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
        begin = beginning(self.tokenizer)
        unused += [
            f"{source.name}: its documents do not begin as the tokeniser begins prompts (bos: "
            f"{shown(self.tokenizer)}); prepare it again, or set data.bos={str(not begin).lower()}"
            for source in self.packs.sources
            if source.packs.dataset.texts and source.packs.dataset.bos != begin
        ]
        return (
            self.said
            + unused
            + masters.notes(self.model)
            + dropout.notes(self.model)
            + [
                f"{source.name}: {note}"
                for source in self.packs.sources
                for note in source.packs.notes("data.pack_tokens", "data.long_documents")
            ]
        )

    def fill(self) -> None:
        """Read what this process holds of a model that has been divided."""
        fill(self.model, "cpu" if self.config.parallel.offload else None)

    @property
    def identity(self) -> Identity:
        """What must be unchanged for a resumed run to go on exactly."""
        data, packs = self.config.data, self.packs
        source = {
            "training.batch_size": self.config.training.batch_size,
            "data.pack_tokens": data.pack_tokens,
            "data.long_documents": data.long_documents,
            "data.train": data_hash(packs),
            LEFT_OUT: sum(source.packs.silent for source in packs.sources),
        }
        return Identity(self.path, self.config, self.device, self.objective, self.model.config, self.shapes, source)


def prepare(config: Config, train: Any = None, validation: Any = None) -> Run:
    """Check the config, open the data, load the model. `train` and `validation` stand in for the config's paths."""
    config, of_run = _of_run(config)
    config, said = own_objective.chosen(config)
    objective = build_objective(config.objective.chosen, config.objective.options())
    device, no_validation = device_of(config), config.data.validation is None and validation is None
    known = Known(config, objective=objective, device=device.type, validation=not no_validation)
    rules.check(known)
    optimizers[config.optimizer.name]
    schedules[config.schedule.name]
    tracking.check(config.log)
    path = Path(config.checkpoint.path)
    refusals.check_writable(path)
    newest(path, config.checkpoint.step)
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.training.seed)

    train = config.data.train if train is None else train
    validation = config.data.validation if validation is None else validation
    if train is None:
        raise UserError("there is nothing to train on: give data.train a prepared dataset, a text folder or JSONL")
    sources = _sources(train)
    Reading.parse({name: getattr(config.data, name) for name in _of_raw(config)}, "data")
    every = [*(source for _, source, _ in sources), *named(validation).values()]
    rules.check(replace(known, prepared=all(map(_is_prepared, every))))
    tokenizer = _tokenizer(config, [source for _, source, _ in sources])
    tokenizer = with_template(tokenizer, config.data.chat_template)
    tokenizer = begin_with(tokenizer, config.data.bos if tokenizer is not None else "auto", "data.bos")
    packs = _mixture(config, sources, tokenizer)
    loaded = load(
        config.model,
        tokenizer,
        seed=config.training.seed,
        device=device,
        vocab_size=None if tokenizer is None else vocabulary_of(tokenizer),
        divided=divides(config),
    )
    if tokenizer is None:
        loaded = loaded._replace(tokenizer=begin_with(loaded.tokenizer, config.data.bos, "data.bos"))
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    for source in packs.sources:
        source.packs.dataset.check_rows(rows, loaded.tokenizer, source.name)
        check_positions(loaded.model, source.packs.longest, source.name, "data.pack_tokens")
    sampler = Sampler(packs, config.training.batch_size, config.training.seed)
    steps = config.training.steps or sampler.steps(config.training.epochs)
    rules.check(replace(known, steps=steps, decoder=spec_of(loaded.model)))
    objective = objective.bind(loaded.model, loaded.tokenizer, loaded.mask_token_id)
    for source in packs.sources:
        refusals.check_targets(objective, source.packs, source.name)
        refusals.check_mask(objective, source.packs.dataset, source.name)
    held_out = _validation(config, validation, loaded, objective)
    # Of a layer that is divided, the rows that are left would be divided anew.
    skips = False if config.parallel.model_parallel_size > 1 else config.model.skip_last_layer
    low_precision.check(config, loaded.model)
    row_model = RowModel(loaded.model, skip_last_layer=skips, backend=config.model.attention)
    apply.check(config.parallel, row_model)
    routing.check(loaded.model, {f"model.{key}": getattr(config.model, key) for key in ("balance_loss", "z_loss")})
    return Run(
        config=config,
        path=path,
        device=device,
        model=loaded.model,
        row_model=row_model,
        tokenizer=loaded.tokenizer,
        objective=objective,
        packs=packs,
        sampler=sampler,
        validation=held_out,
        steps=steps,
        shapes={name: list(parameter.shape) for name, parameter in loaded.model.named_parameters()},
        in_parts=is_unread(loaded.model),
        said=[*of_run, *said],
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


def balanced(run: Run) -> list[int]:
    """Layers of every stage of the pipeline, by times measured here on the first micro-batch."""
    training, parallel = run.config.training, run.config.parallel
    batch, objective = run.sampler.batch(0), run.objective.at(0, run.steps)
    rows = next(rows for rows in micro_batches(objective, batch, training.seed, training.micro_batch))
    with run.arithmetic(), stand_ins(run.model, run.device, decoder_layers(run.model)):
        each, first, last = stages.measured(run.row_model, rows, objective)
    return stages.balanced(each, parallel.stages, first, last)


def data_hash(packs: Mixture) -> str | list[Any]:
    """What the training data are: a hash, of several sources [hash, share of the packs] each."""
    hashes = [source.packs.dataset.digest() for source in packs.sources]
    return hashes[0] if len(hashes) == 1 else [list(pair) for pair in zip(hashes, packs.shares, strict=True)]


def paths_of(data: Any) -> str | list[dict[str, Any]] | None:
    """Data named by paths, as data.train takes them: of a path, or a list of pathlib.Path or {path, weight}; else None.

    A list of strings is a list of texts.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, list) and data and all(map(_is_source, data)):
        items = [{"path": item} if isinstance(item, Path) else item for item in data]
        return [{**item, "path": str(item["path"])} for item in items]
    return None


def _is_source(item: Any) -> bool:
    return isinstance(item, Path) or (isinstance(item, dict) and "path" in item and set(item) <= {"path", "weight"})


def _sources(train: Any) -> list[tuple[str, Any, float | None]]:
    """(name, what `dataset_from` takes, weight) of every source. train: what data.train holds, or data in memory."""
    listed = paths_of(train)
    if isinstance(listed, list):
        train = DataConfig.parse({"train": listed}, "data").train
    if isinstance(train, list) and train and isinstance(train[0], SourceConfig):
        return [(f"data.train={item.path}", item.path, item.weight) for item in train]
    return [(f"data.train={_name(train)}", train, None)]


def _mixture(config: Config, sources: list[tuple[str, Any, float | None]], tokenizer: Any) -> Mixture:
    opened = []
    for name, source, weight in sources:
        dataset = _dataset(source, tokenizer, "data.train", config)
        packs = Packs(dataset, config.data.pack_tokens, config.data.long_documents, name)
        opened.append(Source(name, packs, weight))
    return Mixture(opened)


def _tokenizer(config: Config, sources: list[Any]) -> Any:
    """The tokeniser that is asked for, else a prepared dataset's, else the model's own; None for plain token ids."""
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer)
    for source in sources:
        if isinstance(source, str | Path) and is_dataset(Path(source)):
            own = open_dataset(source).tokenizer_path
            return None if own is None else load_tokenizer(own)
    if config.model.name is None:
        return None
    model = Path(config.model.name)
    if not model.exists():
        raise UserError(
            f"model.name={model}: no such folder or file (models are loaded from disk, not from a hub){fetching(model)}"
        )
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "hf/tokenizer_config.json")
    return load_tokenizer(model) if model.is_file() or any((model / file).exists() for file in files) else None


def _dataset(source: Any, tokenizer: Any, key: str, config: Config) -> Dataset:
    if isinstance(source, str | Path) and not exists(source):
        raise UserError(f"{key}={source}: no such dataset, file or folder")
    options = {} if _is_prepared(source) else {name: getattr(config.data, name) for name in _of_raw(config)}
    dataset = dataset_from(source, tokenizer, **options)
    if dataset.tokens == 0:
        raise UserError(f"{key}={_name(source)}: the dataset is empty")
    return dataset


def _of_raw(config: Config) -> list[str]:
    """The settings that say how sources are read that are not prepared, those that are given."""
    return [name for name in config.data.given() if name in Reading.model_fields and name != "bos"]


def _is_prepared(source: Any) -> bool:
    return isinstance(source, Dataset) or (isinstance(source, str | Path) and is_dataset(Path(source)))


def _name(source: Any) -> Any:
    return source if isinstance(source, str | Path) else type(source).__name__


def _validation(
    config: Config, given: Any, loaded: LoadedModel, objective: Objective
) -> dict[str, list[list[Document]]]:
    """The first evaluation.packs packs of every validation set, the same at every evaluation."""
    found = {}
    for name, source in named(given).items():
        refusals.check_bound(objective)
        key = f"data.validation.{name}" if isinstance(given, dict) else "data.validation"
        dataset, data = _dataset(source, loaded.tokenizer, key, config), config.data
        dataset.check_rows(loaded.model.get_input_embeddings().weight.shape[0], loaded.tokenizer, key)
        packs = Packs(dataset, data.pack_tokens, data.long_documents, f"{key}={_name(source)}")
        count = len(packs) if config.evaluation.packs == 0 else min(config.evaluation.packs, len(packs))
        found[name] = Sampler(packs, count, config.training.seed).batch(0)
        check_positions(loaded.model, packs.longest, f"{key}={_name(source)}", "data.pack_tokens")
        refusals.check_targets(objective, found[name], f"{key}={_name(source)}")
    return found


def named(validation: Any) -> dict[str, Any]:
    """Validation sets by name; none for None."""
    if isinstance(validation, dict):
        return validation
    return {} if validation is None else {"validation": validation}


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
