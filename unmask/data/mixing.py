"""Several sources as one stream of packs, in shares that hold at every moment of a run.

Place p of the stream belongs to a source by a closed form, so nothing has to be counted up to p: the first source has
had round(p * w_0 / (w_0 + w_1 + ...)) of the first p places; what is left of them is divided among the others in the
same way. A rounding is at most half a place off, so of k sources none is ever further than k / 2 places from its
share. (Megatron-LM's blending keeps to shares as closely, by a loop from the first sample on.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from unmask.data.packing import Packs
from unmask.errors import UserError
from unmask.rows import Document
from unmask.rows.random import EPOCH, generator

NOTHING = (
    "holds no token to learn from: every one is a prompt's, has loss_mask 0 or is the only one of its document; give "
    "it responses or texts"
)


@dataclass(frozen=True)
class Source:
    """One of several data sets, by the name that a user knows it by.

    weight: relative number of its tokens in the stream; None: as many as it has.
    """

    name: str
    packs: Packs
    weight: float | None = None


class Mixture:
    """The packs of several sources by place: `pack(place, seed)`.

    One pass is as many packs as all sources have together. Without weights it is each pack once; with them, a source
    may be seen several times in a pass, or not to its end: `passes` tells. len(): packs in a pass.
    """

    def __init__(self, sources: Sequence[Source]):
        given = [source.weight is not None for source in sources]
        if any(given) and not all(given):
            name = sources[given.index(False)].name
            raise UserError(f"{name} has no weight, and others have: give every source one, or none")
        for source in sources:
            if not len(source.packs):
                if source.packs.silent:
                    raise UserError(f"{source.name}: {NOTHING}")
                dropped = ", only such as are longer than a pack" if source.packs.dropped else ""
                raise UserError(f"{source.name}: holds no document{dropped}")
        self.sources = list(sources)
        self._kept: dict[int, tuple[tuple[int, int], np.ndarray]] = {}
        # Places for tokens: sources whose packs are emptier get more of them.
        rates = [
            Fraction(len(source.packs))
            if source.weight is None
            else Fraction(source.weight) * len(source.packs) / source.packs.tokens
            for source in sources
        ]
        self._rest = [(rate / sum(rates[number:])).limit_denominator(1 << 40) for number, rate in enumerate(rates)]
        total = sum(rates)
        #: Of the places, by source.
        self.shares = [float(rate / total) for rate in rates]
        #: Tokens over room for tokens, in the proportions of the stream.
        self.fill = sum(share * source.packs.fill for share, source in zip(self.shares, sources, strict=True))
        #: Of all sources, each counted once; so too what `Packs` counts.
        self.documents = sum(len(source.packs.dataset) for source in sources)
        self.dropped = sum(source.packs.dropped for source in sources)
        self.silent = sum(source.packs.silent for source in sources)
        self.severed = sum(source.packs.severed for source in sources)
        self.tokens = sum(source.packs.tokens for source in sources)

    def __len__(self) -> int:
        return sum(len(source.packs) for source in self.sources)

    def __iter__(self) -> Iterator[list[Document]]:
        return (pack for source in self.sources for pack in source.packs)

    def counts(self, places: int) -> list[int]:
        """How many of the first `places` belong to each source."""
        counts = []
        for share in self._rest:
            own = round_half_up(places * share)
            counts.append(own)
            places -= own
        return counts

    def source(self, place: int) -> tuple[int, int]:
        """(which source a place belongs to, how many earlier places belong to it)."""
        before, after = self.counts(place), self.counts(place + 1)
        number = next(number for number, count in enumerate(before) if after[number] > count)
        return number, before[number]

    def pack(self, place: int, seed: int) -> tuple[int, list[Document]]:
        """(source, its next pack) at a place. Every pass over a source has an order, and noise, of its own."""
        number, count = self.source(place)
        packs, sources = self.sources[number].packs, len(self.sources)
        epoch, index = divmod(count, len(packs))
        documents = packs.documents(int(self._order(number, seed, epoch)[index]), epoch)
        if sources > 1:  # names of their own, and so noise of their own
            documents = [
                Document(document.token, document.supervised, document.sample * sources + number)
                for document in documents
            ]
        return number, documents

    def tokens_of(self, batch: Iterable[Sequence[Document]]) -> dict[str, list[int]]:
        """{"source_tokens": tokens of a batch by source}; nothing for one source."""
        tokens = [0] * len(self.sources)
        for document in (document for pack in batch for document in pack):
            tokens[document.sample % len(tokens)] += len(document)
        return {"source_tokens": tokens} if len(tokens) > 1 else {}

    def _order(self, number: int, seed: int, epoch: int) -> np.ndarray:
        """The order of a pass over a source; that of each source's current pass is kept."""
        kept = self._kept.get(number)
        if kept is None or kept[0] != (seed, epoch):
            order = permutation(len(self.sources[number].packs), seed, epoch * len(self.sources) + number)
            self._kept[number] = kept = (seed, epoch), order
        return kept[1]

    def passes(self, places: int) -> list[float]:
        """How often each source is seen in the first `places`."""
        return [count / len(source.packs) for count, source in zip(self.counts(places), self.sources, strict=True)]


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64 and read-only, that depends on nothing but (seed, epoch).

    It sorts raw Philox words, which numpy promises to keep from version to version, as it does not for `permutation`.
    """
    order = np.argsort(generator(seed, epoch, purpose=EPOCH).bit_generator.random_raw(n), kind="stable")
    order.flags.writeable = False
    return order


def round_half_up(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)
