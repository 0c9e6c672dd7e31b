"""Weights & Biases: a run of `log.options.wandb.project`, offline unless `mode: online`.

Offline files lie in `<run>/wandb`; `wandb sync <run>/wandb/offline-run-*` uploads them. A run that goes on keeps its
id. The step is a number like the others, and the axis of all: W&B's own counter takes no step after a later one, and an
evaluation may come after a resume. Offline W&B cannot say how far it came; the log can, as it was before the resume.
"""

from __future__ import annotations

from typing import Any, Literal

from unmask.config import Section
from unmask.tracking import Start
from unmask.tracking.following import Following, identity


class Options(Section):
    #: Project that groups runs.
    project: str = "unmask"
    #: Name of the run; empty: the name of its folder.
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

    def open(self, run: Start, anew: bool) -> dict[str, int]:
        import wandb

        name, known = identity(run, "wandb", anew)
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
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        last = self._run.summary.get("step")
        return {} if not known else run.logged if last is None else {**run.logged, "step": int(last)}

    def write(self, step: int, numbers: dict[str, float], time: float | None) -> None:
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()
