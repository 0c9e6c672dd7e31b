"""What stops a run that has gone wrong: losses or gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unmask.errors import UserError

#: Consecutive bad steps that end a run; fewer are skipped and logged.
PATIENCE = 3


class FiniteGuard:
    """Counts consecutive steps whose loss or gradient norm is not finite; their updates are skipped."""

    def __init__(self, streak: int = 0):
        self.streak = streak

    def allows(self, loss: float, norm: float, overflow_is_scale: bool = False) -> bool:
        """Whether the step's update may be made.

        overflow_is_scale: an infinite gradient under a finite loss is answered by a smaller loss scale (fp16), and is
        no sign of a diverged model.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.streak = 0
            return True
        if not (overflow_is_scale and math.isfinite(loss)):
            self.streak += 1
        return False

    def check(self, step: int, loss: float, norm: float, samples: Sequence[int]) -> None:
        """Raise UserError after PATIENCE bad steps in a row; `samples` are the documents of the last one."""
        if self.streak < PATIENCE:
            return
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        raise UserError(
            f"step {step}: {what}, {self.streak} steps in a row (samples {shown}): stopped without saving; "
            f"lower optimizer.learning_rate or training.clip, or look at these samples, and run again: it "
            f"goes on from the last checkpoint, if there is one"
        )
