"""Weights & Biases: a run of `log.options.wandb.project`, offline unless `mode: online`.

Offline files lie in `<run>/wandb`; `wandb sync <run>/wandb/offline-run-*` uploads them. A run that goes on keeps its
id. W&B takes the steps of a run in increasing order only and drops what it has, so nothing is there twice.
"""

from __future__ import annotations

from typing import Any, Literal

from unmask.config import Section
from unmask.tracking import Start
from unmask.tracking.following import Following, identity


class Options(Section):
    #: Where runs are put together.
    project: str = "unmask"
    #: Of the run; empty: the name of its folder.
    name: str | None = None
    #: User or team; empty: the account's own.
    entity: str | None = None
    #: Groups runs in the interface.
    group: str | None = None
    #: Labels of the run.
    tags: list[str] = []
    #: `offline` writes files to upload later; `online` needs the network and an account (`wandb login`).
    mode: Literal["offline", "online"] = "offline"


class WeightsAndBiases(Following):
    """Writes through wandb's own run object."""

    Options = Options
    package = "wandb"

    def open(self, run: Start) -> dict[str, int]:
        import wandb

        name, known = identity(run, "wandb")
        options = self.options
        self._run: Any = wandb.init(
            id=name,
            resume="allow",
            project=options.project,
            name=options.name or run.path.resolve().name,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
            mode=options.mode,
            dir=str(run.path),
            config=run.config,
            # The console is ours: wrapping it would break the live display.
            settings=wandb.Settings(console="off", silent=True),
            reinit="create_new",
        )
        # Online it knows how far it came; offline what was written before lies in files of its own.
        reached = run.step if known and options.mode == "offline" else self._run.starting_step - 1
        return {"step": reached, "evaluation": reached}

    def write(self, step: int, numbers: dict[str, float], time: float | None) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
