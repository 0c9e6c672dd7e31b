"""Evaluation during training: the likelihood bound of every validation set, and the noise window that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unmask.engine.engine import Engine
from unmask.objectives import Objective, rebuild
from unmask.tracking import Record
from unmask.training.setup import Run

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound


class Abandoned(Exception):
    """A signal came during an evaluation, which the resumed run repeats."""


def evaluate(
    run: Run, engine: Engine, objective: Objective, steps: int, report: Callable[[int, int], None]
) -> tuple[dict[str, Bound], Objective]:
    """The bound of every set under the same noise at every evaluation, and the objective to go on with; with
    evaluation.ar also the next-token likelihood of every set, as NAME/ar.

    report: called with (packs done, packs) after each round; it may raise to give the evaluation up. The objective only
    changes under block diffusion's `clip: auto`, whose window moves to where the losses of the first set vary least.
    """
    from unmask.evaluation import shared
    from unmask.evaluation.bound import measure

    seed, share = run.config.training.seed, shared(engine.mesh)
    current, causal = objective.at(engine.step, steps), rebuild("ar", {})
    with engine.evaluating() as module:
        found = {
            name: measure(
                module, current, packs, seed=seed, draws=run.config.evaluation.draws, report=report, share=share
            )
            for name, packs in run.validation.items()
        }
        if run.config.evaluation.ar:
            found |= {
                f"{name}/ar": measure(module, causal, packs, report=report, share=share)
                for name, packs in run.validation.items()
            }
    if getattr(objective, "clip", None) == "auto":
        first = next(iter(found.values()))
        objective = objective.reclip(first.level, first.loss)
    return {name: measured.bound for name, measured in found.items()}, objective


def numbers(bounds: dict[str, Bound]) -> Record:
    """The first set's bound as nats_per_token, standard_error and tokens; of several, each also as nats_per_token/NAME
    and so on."""
    record: Record = {}
    for name, found in [("", next(iter(bounds.values()))), *(bounds.items() if len(bounds) > 1 else ())]:
        end = f"/{name}" if name else ""
        record |= {f"{key}{end}": getattr(found, key) for key in ("nats_per_token", "standard_error", "tokens")}
    return record
