"""Where the rows of a step come from: packs of documents, or whatever else a `Source` makes of a step.

A source is asked for one step at a time. One that is `ahead` answers from what it is asked with alone, so that the next
step's rows are made in a thread while the present step computes. One that is not may use the weights as they are now
(rollouts of reinforcement learning), and is asked when its step comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from unmask.config import Config
from unmask.data import Mixture, Sampler
from unmask.data.beginnings import beginning, shown
from unmask.engine.observe import with_levels
from unmask.errors import UserError
from unmask.models.decoder import spec_of
from unmask.models.positions import check_positions
from unmask.objectives import Objective
from unmask.objectives.base import needs_mask
from unmask.rows import Document, Rows
from unmask.runs.resume import LEFT_OUT
from unmask.training import refusals

if TYPE_CHECKING:
    from unmask.engine.engine import Engine
    from unmask.models import LoadedModel

K = TypeVar("K")
T = TypeVar("T")


class Step(NamedTuple):
    """What a source is asked for: step `number` (from 0) of `steps`, under an objective as the config has it. skipped:
    batches that were left out so far (loss spikes)."""

    number: int
    steps: int
    skipped: int
    objective: Objective


@dataclass(frozen=True)
class Batch:
    """The rows of one step.

    objective: as it stands at the step; micro: the micro-batches of this process's replica; tokens, samples: of the
    documents of all replicas; columns: for the log.
    """

    objective: Objective
    micro: list[Rows]
    tokens: int
    samples: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


class Source:
    """Gives a step's rows. `Trainer.train(train_dataset=source)` takes one in place of data."""

    #: Whether a batch is a function of the step alone.
    ahead: ClassVar[bool] = True

    def begin(self, engine: Engine) -> None:
        """Before the first step: the engine that it feeds, from which a source that is not `ahead` may sample."""

    def batch(self, step: Step, part: tuple[int, int] = (0, 1)) -> Batch:
        """The rows of replica r of R in a step, part = (r, R).

        Every process asks for every step; what a Batch tells of all replicas must be the same on all.
        """
        raise NotImplementedError

    def check(self, loaded: LoadedModel, objective: Objective) -> None:
        """UserError for what does not go with the model or its objective, before the first step."""

    def steps(self, epochs: float) -> int:
        """Steps that cover so many passes; UserError where there are no passes to count."""
        raise UserError(f"{type(self).__name__} has no epochs: give the number of steps (training.steps)")

    def fingerprint(self) -> dict[str, Any]:
        """What must be unchanged for a run to be resumed exactly, by the name a user knows it by."""
        return {}

    def notes(self, tokenizer: Any) -> list[str]:
        """What whoever starts the run should know."""
        return []

    def described(self) -> str:
        """What it is, for the header of a run."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Plain values that a checkpoint keeps; none where a step's rows are a function of the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The opposite."""


def asked(source: Source, step: Step, part: tuple[int, int] = (0, 1)) -> Batch:
    """`source.batch`; UserError where a plug-in's returns something else than a Batch."""
    batch = source.batch(step, part)
    if not isinstance(batch, Batch):
        raise UserError(f"{type(source).__name__}.batch returned a {type(batch).__name__}: it has to return a Batch")
    return batch


class Packs(Source):
    """Packs of documents, a function of (seed, step); their rows under the noise of the step."""

    def __init__(self, mixture: Mixture, config: Config):
        self.mixture, self.config = mixture, config
        self.sampler = Sampler(mixture, config.training.batch_size, config.training.seed)

    def documents(self, step: int) -> list[list[Document]]:
        """The packs of a step, of all replicas."""
        return self.sampler.batch(step)

    def batch(self, step: Step, part: tuple[int, int] = (0, 1)) -> Batch:
        training = self.config.training
        packs, objective = self.documents(step.number + step.skipped), step.objective.at(step.number, step.steps)
        micro = micro_batches(objective, packs, training.seed, training.micro_batch, part)
        if self.config.log.levels and objective.places_mask:
            theirs = grouped(packs, training.micro_batch, part)
            mask, bins = needs_mask(objective), self.config.log.levels
            micro = [with_levels(rows, its, mask, bins) for rows, its in zip(micro, theirs, strict=True)]
        return Batch(
            objective,
            micro,
            tokens=sum(len(document) for pack in packs for document in pack),
            samples=[document.sample for pack in packs for document in pack],
            columns={
                "epoch": (step.number + step.skipped + 1) * training.batch_size / len(self.mixture),
                **self.mixture.tokens_of(packs),
            },
        )

    def check(self, loaded: LoadedModel, objective: Objective) -> None:
        rows = spec_of(loaded.model).vocabulary
        for source in self.mixture.sources:
            source.packs.dataset.check_rows(rows, loaded.tokenizer, source.name)
            check_positions(loaded.model, source.packs.longest, source.name, "data.pack_tokens")
            refusals.check_targets(objective, source.packs, source.name)
            refusals.check_mask(objective, source.packs.dataset, source.name)

    def steps(self, epochs: float) -> int:
        return self.sampler.steps(epochs)

    def fingerprint(self) -> dict[str, Any]:
        data, sources = self.config.data, self.mixture.sources
        hashes = [source.packs.dataset.digest() for source in sources]
        mixed = [list(pair) for pair in zip(hashes, self.mixture.shares, strict=True)]
        return {
            "training.batch_size": self.config.training.batch_size,
            "data.pack_tokens": data.pack_tokens,
            "data.long_documents": data.long_documents,
            # A hash, of several sources [hash, share of the packs] each.
            "data.train": hashes[0] if len(hashes) == 1 else mixed,
            LEFT_OUT: sum(source.packs.silent for source in sources),
        }

    def described(self) -> str:
        names = ", ".join(source.name.removeprefix("data.train=") for source in self.mixture.sources)
        return f"{names}: {self.mixture.documents:,} documents, {self.mixture.tokens:,} tokens"

    def notes(self, tokenizer: Any) -> list[str]:
        begin = beginning(tokenizer)
        return [
            f"{source.name}: its documents do not begin as the tokeniser begins prompts (bos: {shown(tokenizer)}); "
            f"prepare it again, or set data.bos={str(not begin).lower()}"
            for source in self.mixture.sources
            if source.packs.dataset.texts and source.packs.dataset.bos != begin
        ] + [
            f"{source.name}: {note}"
            for source in self.mixture.sources
            for note in source.packs.notes("data.pack_tokens", "data.long_documents")
        ]


def grouped(packs: Sequence[list[Document]], size: int, part: tuple[int, int] = (0, 1)) -> Iterator[list[Document]]:
    """The documents of a step's micro-batches, `size` packs each. part: (r, R) gives r, r + R, ... only, those of
    replica r of R."""
    for first in range(part[0] * size, len(packs), part[1] * size):
        yield [document for pack in packs[first : first + size] for document in pack]


def micro_batches(
    objective: Objective, packs: Sequence[list[Document]], seed: int, size: int, part: tuple[int, int] = (0, 1)
) -> list[Rows]:
    """The rows of a step, `size` packs at a time, their documents side by side under the noise levels of the step.

    part: see `grouped`. UserError for data that hold the mask token.
    """
    levels = iter(objective.levels([document for pack in packs for document in pack], seed))
    micro = []
    for number, documents in enumerate(grouped(packs, size)):
        noise = [next(levels) for _ in documents]
        if number % part[1] != part[0]:
            continue
        rows = objective.rows(documents, seed, noise).pruned()
        if objective.places_mask and (rows.label == needs_mask(objective)).any():
            raise UserError(
                f"the training data holds the mask token (id {objective.mask_token_id}), which only noise may place: "
                f"prepare it again without, or choose another model.mask_token_id"
            )
        micro.append(rows)
    return micro


class Loader(Generic[K, T]):
    """`make(key)`, and `ahead(key)` to have it begun in a thread. waited: seconds that `get` has taken in all.

    Where something else is asked for than was begun (an evaluation has changed the objective), that is thrown away.
    """

    def __init__(self, make: Callable[[K], T]):
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[K, Future[T]] | None = None
        self.waited = 0.0

    def get(self, key: K) -> T:
        """The value of `key`, made now unless it was made ahead. Raises what `make` raises."""
        start = time.perf_counter()
        kept, self._next = self._next, None
        try:
            if kept is not None and kept[0] == key:
                return kept[1].result()
            if kept is not None:
                kept[1].cancel()
            return self._make(key)
        finally:
            self.waited += time.perf_counter() - start

    def ahead(self, key: K) -> None:
        """Begin with the value that will be asked for next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "unmask-loader")
        self._next = key, self._thread.submit(self._make, key)

    def close(self) -> None:
        """Let go of the thread; what it is making is not waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
