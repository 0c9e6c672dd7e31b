"""One run with every training feature on, as every process makes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

from tests.parallel.trainer_cases import documents

OPTIONS = [
    "model.dtype=float64", "training.steps=8", "training.batch_size=4", "data.pack_tokens=32",
    "optimizer.name=muon", "schedule.name=wsd", "schedule.decay=0.5", "training.ema=0.8", "training.deterministic=true",
    "training.spike.factor=3", "training.spike.window=3", "checkpoint.every=2", "checkpoint.asynchronous=true",
    "checkpoint.best=true", "evaluation.every=4", "evaluation.packs=2", "log.profile.steps=1", "parallel.timeout=60",
]  # fmt: skip
#: The batch (from 0) whose loss is made to jump.
BAD = 5
TIMED = {"time", "tokens_per_second", "mfu", "memory", "noise_scale"}


def everything(path: str, overrides: list[str], stop: int | None = None) -> dict[str, Any]:
    """Its log without times, its averages, and what is left in the folder."""
    from tests.training.tiny import config, log, weights
    from unmask.engine.engine import Engine
    from unmask.training.trainer import Trainer

    forward, kept = Engine.forward_backward, {}

    def jumping(self: Any, objective: Any, micro: Any) -> Any:
        losses = forward(self, objective, micro)
        batch = self.step + trainer.spikes.offset
        return losses._replace(loss=losses.loss * (9.0 if batch == BAD else 1.0))

    def stopping(trainer: Any, record: Any) -> None:
        kept.update(ema=whole(trainer.engine.ema.average), weights=whole(weights(trainer)))
        if record["step"] == stop:
            trainer.stop()

    settings = config(Path(path), *OPTIONS, *overrides, objective={"name": "block_diffusion", "block_size": 8})
    with mock.patch.object(Engine, "forward_backward", jumping):
        trainer = Trainer(config=settings, callbacks=[stopping])
        trainer.train(documents("packed"), {"packed": documents("packed")[:9], "prompt": documents("prompt")[:7]})
    records = log(Path(path)) if trainer.mesh.first else []
    ranks = [key for record in records for key in record if key.startswith("rank_")]
    return {
        "log": [{key: value for key, value in record.items() if key not in {*TIMED, *ranks}} for record in records],
        "ema": {name: average.numpy() for name, average in kept["ema"].items()},
        "weights": {name: weight.numpy() for name, weight in kept["weights"].items()},
        "state": (trainer.spikes.state_dict()["offset"], trainer.spikes.rollbacks, tuple(trainer.checkpoints.best)),
        "noise": trainer.engine.noise.state_dict() if trainer.engine.noise else None,
        "profile": sorted(os.listdir(Path(path) / "profile")) if trainer.mesh.first else [],
    }


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies, of tensors divided over processes the whole."""
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in tensors.items()
    }


def first_noise(path: str, overrides: list[str]) -> list[float]:
    """[mean square norm of a part, parts] of a first step."""
    from tests.training.tiny import config
    from unmask.training.trainer import Trainer

    found: list[float] = []

    def see(trainer: Any, record: Any) -> None:
        found[:] = [trainer.engine.noise._part, trainer.engine.noise._parts]

    settings = config(Path(path), *overrides, "model.dtype=float64", "training.steps=1", "parallel.timeout=60")
    Trainer(config=settings, callbacks=[see]).train(documents("packed"))
    return found


def full_disk(path: str) -> str:
    """The sentence that a checkpoint in the background ends the run with, on every rank."""
    import errno

    from tests.training.tiny import config
    from unmask.errors import UserError
    from unmask.runs.save import Checkpoints
    from unmask.training.trainer import Trainer

    options = ["parallel.data_parallel_size=2", "checkpoint.asynchronous=true", "checkpoint.every=2"]
    settings = config(Path(path), *options, "training.steps=500", "parallel.timeout=60")
    failure = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(Checkpoints, "_write_tensors", side_effect=failure):
        try:
            Trainer(config=settings).train(documents("packed"))
        except UserError as error:
            return str(error)
    return ""
