"""Which layers are a stage of a pipeline, which rank holds it, and how long ranks idle.

With p ranks, v stages each and m micro-batches of equal stages, ranks idle this share of the time they compute:

    gpipe, 1f1b     (p - 1) / m             Huang et al. 1811.06965; Narayanan et al. 1806.03377, 2006.09503
    interleaved     (p - 1) / (v m)         Narayanan et al. 2104.04473
    zbv             (p - 1) / (6 m)         ZB-V of Qi et al. 2401.10241, m >= 2p - 1: what is left is to fill the
                                            pipeline, if forward and the two halves of backward take equally long
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from unmask.config import Config, ParallelConfig
from unmask.errors import UserError
from unmask.models import RowModel
from unmask.models.decoder import decoder_layers
from unmask.objectives import Objective
from unmask.rows import Rows


@dataclass(frozen=True)
class Layout:
    """Of p ranks, each with `virtual` stages: layers[s]: how many the stage s has, first stages first."""

    schedule: str
    ranks: int
    virtual: int
    layers: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        """Round by round; with zbv the second round runs back, so that the first rank holds both ends."""
        turn, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.schedule == "zbv" and turn == 1 else rank

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def span(self, stage: int) -> range:
        """The layers of a stage."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])


class Event(NamedTuple):
    """What a rank computed. kind: forward, backward, or the latter in two: input (towards the stage before), weight."""

    kind: str
    stage: int
    micro: int
    seconds: float


def bubble(parallel: ParallelConfig, micro: int) -> float:
    """The share of the time they compute for which ranks idle, with `micro` micro-batches on a rank in a step."""
    ranks = parallel.pipeline_stages
    return (ranks - 1) / (micro * {"interleaved": parallel.virtual, "zbv": 6}.get(parallel.schedule, 1))


def resolved(config: Config) -> Config:
    """The config with the training.micro_batch that `parallel.bubble` chooses; the config itself without."""
    training, parallel = config.training, config.parallel
    limit = parallel.bubble
    if limit is None or parallel.pipeline_stages == 1:
        return config
    sizes = [size for size in range(1, training.batch_size + 1) if training.batch_size % size == 0]
    counts = {size: config.passes(size) for size in sizes}
    runs = [size for size in sizes if parallel.too_few(counts[size]) is None]
    fits = [size for size in runs if bubble(parallel, counts[size]) <= limit]
    if not fits:
        best = f"the least is {bubble(parallel, counts[runs[0]]):.3f}" if runs else parallel.too_few(counts[1])
        raise UserError(
            f"parallel.bubble={limit:g}: no training.micro_batch keeps to it with training.batch_size="
            f"{training.batch_size}: {best}; raise batch_size"
        )
    chosen = fits[-1]
    if training.micro_batch not in (1, chosen):
        raise UserError(
            f"training.micro_batch={training.micro_batch}: parallel.bubble={limit:g} chooses {chosen}; leave one out"
        )
    return config.model_copy(update={"training": training.model_copy(update={"micro_batch": chosen})})


def layout_of(parallel: ParallelConfig, layers: Sequence[int]) -> Layout:
    return Layout(parallel.schedule, parallel.pipeline_stages, parallel.virtual, tuple(layers))


def even(parallel: ParallelConfig, layers: int) -> Layout:
    """The layout that the config gives, or one of equally many layers in every stage."""
    own = parallel.stage_layers or balanced([1.0] * layers, parallel.stages)
    return layout_of(parallel, own)


def balanced(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many layers each stage takes, at least one, so that the slowest takes least.

    costs: of every layer; first, last: what the first and the last stage do besides. Dynamic programming over (stages,
    layers); of equals the one whose early stages are longer, so that all ranks find the same.
    """
    count = len(costs)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    best = np.full((stages + 1, count + 1), np.inf)
    cut = np.zeros((stages + 1, count + 1), int)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        extra = (first if stage == 1 else 0.0) + (last if stage == stages else 0.0)
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                slowest = max(best[stage - 1, start], total[end] - total[start] + extra)
                if slowest <= best[stage, end]:
                    best[stage, end], cut[stage, end] = slowest, start
    found, end = [], count
    for stage in range(stages, 0, -1):
        found.append(end - int(cut[stage, end]))
        end = int(cut[stage, end])
    return found[::-1]


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None


def measured(
    row_model: RowModel, rows: Rows, objective: Objective, repeats: int = 3
) -> tuple[list[float], float, float]:
    """Seconds of forward and backward of (every layer, the embedding, norm and head and loss) on these rows.

    The layers' are told from hooks around them, the rest is what is left before and after; medians of `repeats`. The
    row model's gradients are thrown away.
    """
    layers = decoder_layers(row_model.model)
    batch = row_model.collate(rows)
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if row_model.device.type == "cuda":
            torch.cuda.synchronize(row_model.device)
        marks.append(time.perf_counter())

    def watched(layer: torch.nn.Module) -> list[Callable[[], None]]:
        ends = [layer.register_forward_pre_hook(mark), layer.register_full_backward_hook(mark)]
        return [end.remove for end in ends]

    remove = [end for layer in layers for end in watched(layer)]
    # Gradients go as they come: this process holds the whole model for the last time.
    remove += [each.register_post_accumulate_grad_hook(_forget).remove for each in row_model.parameters()
               if each.requires_grad]  # fmt: skip
    training = row_model.training
    row_model.train()
    found = []
    try:
        for _ in range(repeats):
            marks.clear()
            mark()
            terms = row_model(batch, objective)
            mark()
            terms.sum.backward()
            mark()
            found.append(np.diff(marks))
    finally:
        for end in remove:
            end()
        row_model.train(training)
    spans, n = np.median(found, axis=0), len(layers)
    # Forward: embedding, layers, the last with the head; backward: the head with the last layer, layers, embedding.
    forward, backward = spans[: n + 1], spans[n + 1 :]
    typical = float(np.median(forward[1:n])) + float(np.median(backward[1:n])) if n > 1 else 0.0
    ends = float(forward[n] + backward[0])
    each = [typical] * n
    return each, float(forward[0] + backward[n]), max(0.0, ends - typical)
