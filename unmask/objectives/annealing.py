"""Attention annealing: noisy rows begin causal inside their block and come to see all of it (DiffuLLaMA).

At step s of the first S a row at place i of a block of n sees its own first

    i + 1 + floor(s / S * (n - 1 - i))    rows,

itself and those before it at s = 0, the whole block from s = S on. DiffuLLaMA (Gong et al. 2410.17891) opens the upper
triangle of the attention mask at random places; here it opens from the diagonal outwards, which stays two integers a
row. Clean rows, and which of them a noisy row sees, are not annealed.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from unmask.objectives.base import Objective


class Annealed(Objective):
    """An objective with noisy blocks whose attention may be annealed. Evaluation and decoding see whole blocks."""

    #: Steps until noisy rows attend to all later rows of their block; below 1, a fraction of all; 0: at once.
    anneal: float = Field(default=0.0, ge=0)
    #: The share of them that it sees now.
    ahead: float = Field(default=1.0, ge=0, le=1, exclude=True)

    def settled(self) -> dict[str, Any]:
        """Its attention was opened while it was trained."""
        return {key: value for key, value in super().settled().items() if key != "anneal"}

    def at(self, step: int, steps: int) -> Self:
        """The objective as it stands at `step` of `steps`."""
        return self.model_copy(update={"ahead": self._share(step, steps)}) if self.anneal else self

    def moving(self, step: int, steps: int) -> dict[str, Any]:
        """The share of the later rows that is seen, while it is annealed."""
        return {"ahead": self._share(step, steps)} if self.anneal else {}

    def _share(self, step: int, steps: int) -> float:
        until = self.anneal * steps if self.anneal < 1 else self.anneal
        return min(1.0, step / until)
