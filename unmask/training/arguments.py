"""What a program gives `Trainer`, beside or in place of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.config import Config, ParallelConfig, rules
from unmask.config.rules import Known
from unmask.errors import UserError, as_path
from unmask.parallel.stages import resolved
from unmask.training.datasets import paths_of

#: How to make what `Trainer` takes.
MAKE_ONE: dict[type, str] = {
    Config: "make one with Config.load(path) or Config.parse({...})",
    ParallelConfig: "write ParallelConfig(...)",
}


def configured(
    config: Config | None, model_name: str | Path | None, parallel: ParallelConfig | None, path: str | Path | None
) -> Config:
    """The config with the arguments of `Trainer()` in it; UserError for what is none of its kind."""
    for name, value, kind in (("config", config, Config), ("parallel_config", parallel, ParallelConfig)):
        if value is not None and not isinstance(value, kind):
            raise UserError(f"Trainer: {name} is a {kind.__name__}, not {value!r}; {MAKE_ONE[kind]}")
    if model_name is not None:
        model_name = as_path(model_name, "a model (model_name)")
    if path is not None:
        path = str(path and as_path(path, "a run (checkpoint_path)"))
    config = replaced(config or Config(), "checkpoint", path=path)
    if model_name is not None:
        config = replaced(config, "model", name=str(model_name))
        config.model.config = None
    if parallel is not None:
        config = config.model_copy(update={"parallel": parallel})
    rules.check(Known(parallel=config.parallel))
    return config


def with_data(config: Config, train: Any, validation: Any, epochs: float | None, batch_size: int | None) -> Config:
    """The config with the arguments of `Trainer.train` in it, as far as a file can hold them."""
    config = replaced(config, "training", epochs=epochs, batch_size=batch_size)
    if epochs is not None:
        config.training.steps = None
    paths = {"train": paths_of(train), "validation": paths_of(validation)}
    named: dict[str, Any] = {key: value for key, value in paths.items() if value is not None}
    if isinstance(validation, dict) and all(isinstance(value, str | Path) for value in validation.values()):
        named["validation"] = {name: str(value) for name, value in validation.items()}
    tree = replaced(config, "data", **named).model_dump(warnings=False)
    return resolved(Config.parse(tree, "arguments of Trainer"))


def replaced(config: Config, section: str, **values: Any) -> Config:
    """A copy of the config in which the values that are not None replace the section's."""
    given = {key: value for key, value in values.items() if value is not None}
    return config.model_copy(update={section: getattr(config, section).model_copy(update=given)})
