"""Evaluation during training: the likelihood bound on held-out packs, and the noise window that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unmask.objectives import Objective
from unmask.training.setup import Run

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound, Share


def evaluate(
    run: Run, objective: Objective, step: int, steps: int, report: Callable[[int, int], None], share: Share
) -> tuple[Bound, Objective]:
    """The bound under the same noise at every evaluation, and the objective to go on with.

    report: called with (packs done, packs) after each round; it may raise to give the evaluation up. share: which of
    the packs this process takes. The objective only changes under block diffusion's `clip: auto`, whose window moves to
    where the losses vary least.
    """
    from unmask.evaluation.bound import measure

    assert run.validation is not None
    seed, draws = run.config.training.seed, run.config.evaluation.draws
    current = objective.at(step, steps)
    with run.arithmetic():
        found = measure(run.row_model, current, run.validation, seed=seed, draws=draws, report=report, share=share)
    if getattr(objective, "clip", None) == "auto":
        objective = objective.reclip(found.level, found.loss)
    return found.bound, objective
