"""Evaluation during training: the likelihood bound on held-out packs, and the noise window that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from unmask.objectives import Objective
from unmask.objectives.clip import block_losses
from unmask.training.setup import Run

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound


def evaluate(
    run: Run, objective: Objective, step: int, steps: int, report: Callable[[int, int], None]
) -> tuple[Bound, Objective]:
    """The bound under the same noise at every evaluation, and the objective to go on with.

    report: called with (packs done, packs) after each; it may raise to give the evaluation up.
    The objective only changes under block diffusion's `clip: auto`, whose window moves to where the losses vary least.
    """
    from unmask.evaluation.bound import bound

    assert run.validation is not None
    current = objective.at(step, steps)
    seed, draws = run.config.training.seed, run.config.evaluation.draws
    run.row_model.eval()
    with run.arithmetic():
        result = bound(run.row_model, current, run.validation, seed=seed, draws=draws, report=report)
        if getattr(objective, "clip", None) == "auto":
            objective = objective.reclip(*_losses_by_level(run, current.evaluation(), seed))
    return result, objective


def _losses_by_level(run: Run, objective: Objective, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(noise level, loss) of every block of the validation packs, float64 [blocks] each."""
    assert run.validation is not None
    levels = iter(objective.levels([document for pack in run.validation for document in pack], seed))
    samples = []
    for pack in run.validation:
        rows = objective.rows(pack, seed, [next(levels) for _ in pack])
        with torch.no_grad():
            nll = run.row_model(run.row_model.collate(rows), objective, per_row=True)
        samples.append(block_losses(rows, nll.float().cpu().numpy()))
    level, loss = (np.concatenate(parts) for parts in zip(*samples, strict=True))
    return level, loss
