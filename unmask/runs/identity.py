"""What a run is: all that must be unchanged for it to go on, or to be done again, with the same numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.config import Config
from unmask.models.families import ORIGIN
from unmask.objectives import Objective


@dataclass(frozen=True)
class Identity:
    """model: transformers' configuration; shapes: of the whole model's parameters, by name; source: what the source of
    its rows says of itself (`unmask.training.source`)."""

    path: Path
    config: Config
    device: torch.device
    objective: Objective
    model: Any
    shapes: dict[str, list[int]]
    source: dict[str, Any]

    def exact(self) -> dict[str, Any]:
        """What must be unchanged, by the name a user knows it by."""
        config = self.config
        model = {"config": settings_of(self.model), "dtype": config.model.dtype, "shapes": self.shapes}
        return {
            "objective.name": config.objective.chosen,
            **{f"objective.{name}": value for name, value in self.objective.model_dump(mode="json").items()},
            "training.seed": config.training.seed,
            **self.source,
            "optimizer.name": config.optimizer.name,
            "optimizer.state": config.optimizer.state,
            "model": model,
            **({"model.lora": config.model.lora.model_dump(mode="json")} if config.model.lora.rank else {}),
        }


def settings_of(config: Any) -> dict[str, Any]:
    """A model's configuration as JSON keeps it, without what does not change the function it computes."""
    passing = ("transformers_version", "_name_or_path", "dtype", "architectures", "use_cache", ORIGIN)
    fields = {key: value for key, value in config.to_dict().items() if key not in passing}
    return json.loads(json.dumps(fields, default=str))
