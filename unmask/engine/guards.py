"""What stops a run that has gone wrong: losses or gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unmask.errors import UserError

#: Consecutive bad steps that end a run; fewer are skipped and logged.
PATIENCE = 3
#: Consecutive overflows of fp16 that end it: from its first scale, 2^16, that many halvings come below SMALLEST.
OVERFLOWS = 20
#: A loss scale below it makes gradients smaller than they are: what overflows still is no matter of the scale.
SMALLEST = 1.0


class FiniteGuard:
    """Counts consecutive steps whose loss or gradient norm is not finite; their updates are skipped.

    streak: of those that no smaller loss scale mends; overflows: of those that one might (fp16).
    """

    def __init__(self, streak: int = 0, overflows: int = 0):
        self.streak, self.overflows = streak, overflows

    def allows(self, loss: float, norm: float, overflow_is_scale: bool = False) -> bool:
        """Whether the step's update may be made.

        overflow_is_scale: a gradient that is not finite under a finite loss is answered by a smaller loss scale (fp16),
        and is for OVERFLOWS steps no sign of a diverged model.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.streak = self.overflows = 0
            return True
        if overflow_is_scale and math.isfinite(loss):
            self.overflows += 1
        else:
            self.streak += 1
        return False

    def check(self, step: int, loss: float, norm: float, samples: Sequence[int], scale: float | None = None) -> None:
        """Raise UserError after PATIENCE bad steps in a row; `samples` are the documents of the last one.

        scale: the loss scale of the next step (fp16). After OVERFLOWS in a row, or one that takes it below SMALLEST, no
        scale helps.
        """
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        advice = "look at these samples, and run again: it is resumed from the last checkpoint, if there is one"
        if self.streak >= PATIENCE:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            raise UserError(
                f"step {step}: {what}, {self.streak} steps in a row (samples {shown}): stopped without saving; "
                f"lower optimizer.learning_rate or training.clip, or {advice}"
            )
        if scale is not None and self.overflows and (self.overflows >= OVERFLOWS or scale < SMALLEST):
            raise UserError(
                f"step {step}: the gradient norm is {norm} in fp16, {self.overflows} steps in a row, whatever the loss "
                f"scale, now {scale:g} (samples {shown}): stopped without saving; use training.precision=bf16 or fp32, "
                f"lower optimizer.learning_rate, or {advice}"
            )
