"""The one description of a training run: a YAML file plus dotted overrides, checked before anything starts.

Unknown keys are errors that name the path and the nearest valid key. What the objective accepts besides `name`
is checked by the objective itself (each is a pydantic model of its own), so plug-ins bring their own options.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import model_validator

from unmask.config.overrides import make_way, remove
from unmask.config.parallel import ParallelConfig
from unmask.config.section import Section, keys, type_name
from unmask.config.sections import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProfileConfig,
    ScheduleConfig,
    SourceConfig,
    SpikeConfig,
    TrainingConfig,
)
from unmask.errors import UserError, as_path
from unmask.parsing import NotYaml, yaml_text, yaml_value

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LogConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "ScheduleConfig",
    "Section",
    "SourceConfig",
    "SpikeConfig",
    "TrainingConfig",
    "apply_override",
    "apply_overrides",
    "flat",
    "keys",
    "type_name",
]


class Config(Section):
    """A whole run. `Config.load(path, overrides)` reads YAML and applies `key.path=value` and `~key.path`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.training.batch_size % self.training.micro_batch:
            raise ValueError(
                f"training.batch_size={self.training.batch_size} must be a multiple of "
                f"training.micro_batch={self.training.micro_batch}"
            )
        if self.model.name and self.model.config:
            raise ValueError("give model.name (a checkpoint) or model.config (random initialisation), not both")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Config:
        """Read a YAML file and apply overrides like `optimizer.learning_rate=1e-4` (values are YAML)."""
        file = as_path(path, "a config file")
        try:
            tree = yaml_value(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path}: no such config file") from None
        except IsADirectoryError:
            own = file / "config.yaml"
            again = f"name {own}, or use `unmask train --from {path}` to do its run again"
            hint = again if own.is_file() else "name one"
            raise UserError(f"{path}: is a folder, not a config file: {hint}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        except NotYaml as error:
            where = f":{error.line}" if error.line else ""
            raise UserError(f"{path}{where}: not valid YAML: {error}") from None
        tree = {} if tree is None else tree
        if not isinstance(tree, dict):
            raise UserError(f"{path}: a config is a mapping of sections, not a {type(tree).__name__}")
        apply_overrides(tree, overrides or [])
        return cls.parse(tree, str(path))

    def passes(self, micro_batch: int | None = None) -> int:
        """Micro-batches that a rank computes in a step. micro_batch: in place of the config's."""
        in_all = self.training.batch_size // (micro_batch or self.training.micro_batch)
        return -(-in_all // (self.parallel.data_parallel_size * self.parallel.shard_size))

    def dump(self) -> str:
        """The resolved config as YAML; `Config.load` of it gives this config again."""
        return yaml_text(json.loads(self.model_dump_json()))


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Change what a file says by `key.path=value` and `~key.path`, which removes a key; what they displace goes too."""
    changes: list[str] = []
    for override in overrides:
        if override.startswith("~"):
            remove(tree, override)
        else:
            changes.append(override)
    given: dict[str, Any] = {}
    for change in changes:
        apply_override(given, change)
    make_way(tree, given)
    for change in changes:
        apply_override(tree, change)


def apply_override(
    tree: dict[str, Any], text: str, form: str = "key.path=value", example: str = "training.steps=100"
) -> None:
    """Set `key.path=value` in a nested dict; the value is YAML. form, example: how a text should look."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"{text!r} is not of the form {form}, such as {example}")
    *parents, last = key.split(".")
    node: Any = tree
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    try:
        node[last] = yaml_value(value)
    except NotYaml as error:
        raise UserError(f"{text[:200]!r}: not a valid YAML value: {error}") from None


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts with the keys that a user writes: section.key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
