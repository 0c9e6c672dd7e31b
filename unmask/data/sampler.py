"""Which packs a step trains on: a pure function of (seed, step), so that there is no state to save or to lose."""

from __future__ import annotations

import math
from fractions import Fraction

from unmask.data.mixing import Mixture, Source
from unmask.data.packing import Packs
from unmask.rows import Document


class Sampler:
    """The stream of packs of one source or of several, cut into batches of `batch_size` packs.

    Of one source it is passes over its packs, each in an order of its own. A batch may cross from one pass into the
    next, or span several when there are few packs.
    """

    def __init__(self, packs: Packs | Mixture, batch_size: int, seed: int):
        self.mixture = packs if isinstance(packs, Mixture) else Mixture([Source(packs.name, packs)])
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch holds at least one pack")
        self.batch_size, self.seed = batch_size, seed

    def steps(self, epochs: float) -> int:
        """Steps that cover `epochs` passes over the packs, at least 1."""
        # As people write the number: 50 packs times the double next to 0.14 are a little more than 7.
        return max(1, math.ceil(Fraction(str(epochs)) * len(self.mixture) / self.batch_size))

    def passes(self, steps: int) -> float:
        """Passes over the packs that `steps` make."""
        return steps * self.batch_size / len(self.mixture)

    def batch(self, step: int) -> list[list[Document]]:
        """The packs of step `step` (from 0), each a list of Documents."""
        return [self.mixture.pack(place, self.seed)[1] for place in self._places(step)]

    def sources(self, step: int) -> list[int]:
        """Which source each pack of step `step` is from."""
        return [self.mixture.source(place)[0] for place in self._places(step)]

    def _places(self, step: int) -> range:
        return range(step * self.batch_size, (step + 1) * self.batch_size)
