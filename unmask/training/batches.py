"""The micro-batches of a step: which packs go through the model together, and their rows."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.errors import UserError
from unmask.objectives import Objective
from unmask.objectives.base import needs_mask
from unmask.rows import Document, Rows

Batch = Sequence[list[Document]]


def grouped(batch: Batch, size: int, part: tuple[int, int] = (0, 1)) -> list[list[Document]]:
    """The documents of a step's micro-batches, `size` packs each. part: (r, R) gives r, r + R, ... only, those of
    replica r of R."""
    micro = [[document for pack in batch[first : first + size] for document in pack]
             for first in range(0, len(batch), size)]  # fmt: skip
    return micro[part[0] :: part[1]]


def micro_batches(
    objective: Objective, batch: Batch, seed: int, size: int, part: tuple[int, int] = (0, 1)
) -> list[Rows]:
    """The rows of a step, `size` packs at a time, their documents side by side under the noise levels of the step.

    part: see `grouped`.
    """
    levels = iter(objective.levels([document for pack in batch for document in pack], seed))
    micro = []
    for number, documents in enumerate(grouped(batch, size)):
        its_levels = [next(levels) for _ in documents]
        if number % part[1] != part[0]:
            continue
        rows = objective.rows(documents, seed, its_levels).pruned()
        if objective.places_mask and (rows.label == needs_mask(objective)).any():
            raise UserError(
                f"the training data holds the mask token (id {objective.mask_token_id}), which only noise may place: "
                f"prepare it again without, or choose another model.mask_token_id"
            )
        micro.append(rows)
    return micro
