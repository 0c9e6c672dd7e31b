"""Loss spikes: go back to the last checkpoint and past the data seen since (PaLM, Chowdhery et al. 2204.02311, 5.1).

A step's loss is a spike when it exceeds factor * median(the last `window` losses). The run then takes up the last
checkpoint, of step c, and goes on with the batches after the spike's: where that was the k-th of the run, those
numbered c .. k-1 are not seen again. The schedule stays the step's. Everything follows from the loss, which all
processes share, and from what the checkpoint holds: a run that dies and resumes meets the same spike and answers it in
the same way.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from unmask.config import SpikeConfig
from unmask.errors import UserError


class SpikeGuard:
    """The losses a spike is judged by, how often the run went back, and `offset`: batches left out so far, so that
    step s trains on batch s + offset."""

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.window)
        self.rollbacks = self.offset = 0

    @property
    def limit(self) -> float:
        """The loss above which a step is a spike; infinite before the window is full, and where none is looked for."""
        full = len(self.losses) == self.config.window
        return self.config.factor * median(self.losses) if self.config.factor and full else math.inf

    def sees(self, loss: float) -> bool:
        """Whether `loss` is a spike; one that is none, and finite, joins the window."""
        if not math.isfinite(loss):  # the other guard's
            return False
        if loss > self.limit:
            return True
        if self.config.factor:
            self.losses.append(loss)
        return False

    def check(self, step: int, loss: float) -> None:
        """Raise UserError when the run has gone back as often as it may."""
        if self.rollbacks == self.config.rollbacks:
            raise UserError(
                f"step {step}: the loss is {loss:.4g}, above {self.config.factor:g} times the median of the last "
                f"{self.config.window}, and the run went back {self.rollbacks} times already: stopped; lower "
                f"optimizer.learning_rate, or raise training.spike.rollbacks, and run again to resume from the last "
                f"checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "rollbacks": self.rollbacks, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.config.window)
        self.rollbacks, self.offset = state["rollbacks"], state["offset"]
