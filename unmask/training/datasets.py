"""The data of a run, opened: what `Trainer.train` was given, or what the `data` section of its config names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.config import Config, DataConfig, SourceConfig, rules
from unmask.config.rules import Known
from unmask.data import Dataset, Mixture, Packs, Reading, Sampler, Source, dataset_from, load_tokenizer, open_dataset
from unmask.data.sources import exists, is_dataset
from unmask.errors import UserError
from unmask.hf import fetching
from unmask.models import LoadedModel
from unmask.models.positions import check_positions
from unmask.objectives import Objective
from unmask.training import refusals

if TYPE_CHECKING:
    from unmask.rows import Document


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


def listed(train: Any) -> list[tuple[str, Any, float | None]]:
    """(name, what `dataset_from` takes, weight) of every source. train: what data.train holds, or data in memory."""
    paths = paths_of(train)
    if isinstance(paths, list):
        train = DataConfig.parse({"train": paths}, "data").train
    if isinstance(train, list) and train and isinstance(train[0], SourceConfig):
        return [(f"data.train={item.path}", item.path, item.weight) for item in train]
    return [(f"data.train={_name(train)}", train, None)]


def mixture(config: Config, sources: list[tuple[str, Any, float | None]], tokenizer: Any) -> Mixture:
    opened = []
    for name, source, weight in sources:
        dataset = _dataset(source, tokenizer, "data.train", config)
        packs = Packs(dataset, config.data.pack_tokens, config.data.long_documents, name)
        opened.append(Source(name, packs, weight))
    return Mixture(opened)


def tokenizer_of(config: Config, sources: list[Any]) -> Any:
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


def check_raw(config: Config, sources: list[Any], known: Known) -> None:
    """UserError for settings of sources that are not prepared where there are none, or that are not valid."""
    Reading.parse({name: getattr(config.data, name) for name in _of_raw(config)}, "data")
    rules.check(replace(known, prepared=all(map(_is_prepared, sources))))


def _is_prepared(source: Any) -> bool:
    return isinstance(source, Dataset) or (isinstance(source, str | Path) and is_dataset(Path(source)))


def _name(source: Any) -> Any:
    return source if isinstance(source, str | Path) else type(source).__name__


def held_out(config: Config, given: Any, loaded: LoadedModel, objective: Objective) -> dict[str, list[list[Document]]]:
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
