"""Evaluation during training: the likelihood bound of every validation set, and the noise window that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from unmask.objectives import Objective
from unmask.objectives.clip import block_losses
from unmask.rows import Document
from unmask.tracking import Record
from unmask.training.setup import Run

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound


def evaluate(
    run: Run, objective: Objective, step: int, steps: int, report: Callable[[int, int], None]
) -> tuple[dict[str, Bound], Objective]:
    """The bound of every set under the same noise at every evaluation, and the objective to go on with.

    report: called with (packs done, packs) after each; it may raise to give the evaluation up.
    The objective only changes under block diffusion's `clip: auto`, whose window moves to where the losses of the first
    set vary least.
    """
    from unmask.evaluation.bound import bound

    current = objective.at(step, steps)
    seed, draws = run.config.training.seed, run.config.evaluation.draws
    run.row_model.eval()
    with run.arithmetic():
        bounds = {
            name: bound(run.row_model, current, packs, seed=seed, draws=draws, report=report)
            for name, packs in run.validation.items()
        }
        if getattr(objective, "clip", None) == "auto":
            first = next(iter(run.validation.values()))
            objective = objective.reclip(*_losses_by_level(run, current.evaluation(), seed, first))
    return bounds, objective


def numbers(bounds: dict[str, Bound]) -> Record:
    """The first set's bound as nats_per_token, standard_error and tokens; of several, each also as nats_per_token/NAME
    and so on."""
    record: Record = {}
    for name, found in [("", next(iter(bounds.values()))), *(bounds.items() if len(bounds) > 1 else ())]:
        end = f"/{name}" if name else ""
        record |= {f"{key}{end}": getattr(found, key) for key in ("nats_per_token", "standard_error", "tokens")}
    return record


def _losses_by_level(
    run: Run, objective: Objective, seed: int, packs: list[list[Document]]
) -> tuple[np.ndarray, np.ndarray]:
    """(noise level, loss) of every block of `packs`, float64 [blocks] each."""
    levels = iter(objective.levels([document for pack in packs for document in pack], seed))
    samples = []
    for pack in packs:
        rows = objective.rows(pack, seed, [next(levels) for _ in pack])
        with torch.no_grad():
            nll = run.row_model(run.row_model.collate(rows), objective, per_row=True)
        samples.append(block_losses(rows, nll.float().cpu().numpy()))
    level, loss = (np.concatenate(parts) for parts in zip(*samples, strict=True))
    return level, loss
