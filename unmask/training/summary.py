"""How a run ended, for a person and for a program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import counted

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound


@dataclass(frozen=True)
class Summary:
    """loss: of the last step; interrupted: the number of the signal that ended the run, if one did; validations: the
    last bound of every validation set, validation: of the first."""

    step: int
    steps: int
    loss: float | None
    path: Path
    checkpoint: Path | None
    interrupted: int | None = None
    validations: dict[str, Bound] = field(default_factory=dict)

    @property
    def validation(self) -> Bound | None:
        return next(iter(self.validations.values()), None)

    def facts(self) -> dict[str, Any]:
        """The summary as plain values, for JSON."""
        bound = self.validation
        return {
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "path": str(self.path),
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "interrupted": self.interrupted,
            "nats_per_token": bound and bound.nats_per_token,
            "standard_error": bound and bound.standard_error,
            "validations": {name: found.asdict() for name, found in self.validations.items()},
        }

    def sentence(self, again: str) -> str:
        """What a person wants to know at the end; `again` is the command that continues an interrupted run."""
        if self.interrupted is not None:
            saved = f"saved {self.checkpoint}" if self.checkpoint else "nothing was trained yet"
            return f"stopped at step {self.step} of {self.steps}: {saved}; continue with: {again}"
        if self.loss is None:
            return f"{self.path} is complete at step {self.step}: {self.checkpoint}"
        return f"trained {counted(self.step, 'step')}, loss {self.loss:.4f}: {self.checkpoint}"
