"""What a rank of a pipeline does while it trains."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.trainer_cases import MODELS, OBJECTIVES, Case, documents
from unmask.parallel.stages import Event
from unmask.tracking import Record


def records(case: Case, path: str) -> list[Record]:
    """The records of every step."""
    from tests.training.tiny import config, log
    from unmask.training.trainer import Trainer

    trainer = Trainer(config=config(Path(path), *case.overrides(), "training.steps=4"))
    trainer.train(documents(case.data))
    return log(Path(path)) if trainer.mesh.first else []


def events(case: Case, path: str) -> list[Event]:
    """The events of the last of two steps."""
    from tests.training.tiny import config
    from unmask.training.trainer import Trainer

    settings = config(Path(path), *case.overrides(), "training.steps=2", objective=OBJECTIVES[case.objective],
                      model=MODELS[case.model])  # fmt: skip
    trainer = Trainer(config=settings)
    trainer.train(documents(case.data))
    return trainer.engine.module.work.events
