"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
            "loss": self.loss,
            "path": str(self.path),
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "interrupted": self.interrupted,
            "nats_per_token": bound and bound.nats_per_token,
            "standard_error": bound and bound.standard_error,
            "validations": {name: found.asdict() for name, found in self.validations.items()},
        }
