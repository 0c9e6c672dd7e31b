"""Which packs a step trains on: a pure function of (seed, step), so that there is no state to save or to lose."""

from __future__ import annotations

import math

from unmask.data.order import permutation
from unmask.data.packing import Packs
from unmask.errors import UserError
from unmask.rows import Document


class Sampler:
    """Passes over the packs end to end, each in an order of its own, cut into batches of `batch_size` packs.

    A batch may cross from one epoch into the next, or span several when there are few packs.
    """

    def __init__(self, packs: Packs, batch_size: int, seed: int):
        if not len(packs):
            raise UserError("the training data holds no document")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch holds at least one pack")
        self.packs, self.batch_size, self.seed = packs, batch_size, seed

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every pack has been seen."""
        return self.steps(1)

    def steps(self, epochs: float) -> int:
        """Steps that cover `epochs` passes over the packs, at least 1."""
        return max(1, math.ceil(epochs * len(self.packs) / self.batch_size))

    def batch(self, step: int) -> list[list[Document]]:
        """The packs of step `step` (from 0), each a list of Documents."""
        first = step * self.batch_size
        return [self._pack(place) for place in range(first, first + self.batch_size)]

    def _pack(self, place: int) -> list[Document]:
        epoch, index = divmod(place, len(self.packs))
        return self.packs.documents(int(permutation(len(self.packs), self.seed, epoch)[index]), epoch)
