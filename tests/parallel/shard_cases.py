"""What a rank holds and sends while it trains a divided model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.parallel.trainer_cases import MODELS, OBJECTIVES, Case, documents


def held(case: Case, path: str) -> dict[str, Any]:
    """Bytes of this rank's parameters, gradients (when an update is made) and optimiser state, and what it sent."""
    from tests.training.tiny import config, log
    from unmask.engine.scaling import SharedScaler
    from unmask.training.trainer import Trainer

    found: dict[str, Any] = {}
    update = SharedScaler.update

    def seen(scaler: SharedScaler, *args: Any) -> None:
        update(scaler, *args)
        parameters = list(trainer.run.model.parameters())
        states = [value for state in trainer.engine.optimizer.state.values() for value in state.values() if value.dim()]
        for name, tensors in (
            ("parameter_bytes", [*parameters, *trainer.run.model.buffers()]),
            ("gradient_bytes", [each.grad for each in parameters]),
            ("optimizer_bytes", states),
        ):
            found[name] = sum(_local(tensor).nbytes for tensor in tensors)

    with mock.patch.object(SharedScaler, "update", seen):
        trainer = Trainer(config=config(Path(path), *case.overrides(), "training.steps=1", **named(case)))
        trainer.train(documents(case.data))
    return {**found, "sent": log(Path(path))[-1]["rank_sent"]}


def named(case: Case) -> dict[str, Any]:
    return {"model": MODELS[case.model], "objective": OBJECTIVES[case.objective]}


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
