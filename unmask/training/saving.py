"""The checkpoints of a run as its loop uses them: saved, resumed from, gone back to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.engine.engine import Engine
from unmask.objectives import Objective
from unmask.runs import folder as layout
from unmask.runs.resume import continued
from unmask.runs.save import Checkpoints
from unmask.training.setup import Run
from unmask.training.spikes import SpikeGuard


class Saving:
    """last: the folder of the newest checkpoint that holds what the engine is, or was when it was taken up."""

    def __init__(self, run: Run, engine: Engine, spikes: SpikeGuard):
        self.run, self.engine, self.spikes = run, engine, spikes
        self.checkpoints = Checkpoints(run.path, engine, run.config.checkpoint)
        self.last: Path | None = None

    @property
    def current(self) -> bool:
        """Whether the present step has been saved."""
        return self.last == layout.step_folder(self.run.path, self.engine.step)

    def save(self, objective: Objective, steps: int) -> Path:
        """Write a checkpoint of the present step; objective: as evaluations have left it; steps: of the whole run."""
        run = self.run
        state: dict[str, Any] = {"steps": steps, "objective": objective.model_dump(mode="json")}
        state |= {"exact": run.identity.exact(), "spikes": self.spikes.state_dict()}
        state |= {"source": source} if (source := run.source.state_dict()) else {}
        config, step = run.config.dump(), self.engine.step
        self.engine.mesh.by_writers(lambda: self.checkpoints.save(step, state, config, run.tokenizer))
        self.last = layout.step_folder(run.path, step)
        return self.last

    def resume(self, objective: Objective) -> tuple[Path | None, Objective]:
        """Take up the newest checkpoint (or checkpoint.step) of the run's folder: (its folder if there is one, the
        objective as it was saved)."""
        folder = continued(self.run.identity)
        return folder, objective if folder is None else self.restore(folder, objective)

    def restore(self, folder: Path, objective: Objective) -> Objective:
        """Everything as it was when the checkpoint was made; returns the objective, bound to the model as this one."""
        state = self.checkpoints.load(folder)
        self.last = folder
        with layout.taking_up(folder):
            parts: dict[str, Any] = {"spikes": self.spikes, "source": self.run.source}
            for name, part in parts.items():
                if state.get(name):  # what was switched on since begins anew
                    part.load_state_dict(state[name])
            return type(objective)(**state["objective"], **objective.bound())

    def go_back(self, folder: Path, objective: Objective) -> Objective:
        """Take up an earlier checkpoint of this run, and leave out the data since (see `unmask.training.spikes`)."""
        mesh, spikes = self.engine.mesh, self.spikes
        mesh.by_writers(self.checkpoints.wait)
        batches, rollbacks = self.engine.step + spikes.offset, spikes.rollbacks + 1
        objective = mesh.together(lambda: self.restore(folder, objective))
        spikes.rollbacks, spikes.offset = rollbacks, batches - self.engine.step
        return objective
