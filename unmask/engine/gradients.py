"""The gradient of a step: forward and backward over its micro-batches, summed over processes, and clipped.

The loss of a step is sum(weight * nll) / sum(count) over all its packs: the counts are known from the rows before the
first backward pass, so accumulation and any number of ranks give the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unmask.engine.ema import local
from unmask.parallel import replicas, shard
from unmask.parallel.pipeline import Pipeline
from unmask.rows import Rows, flops, inert

if TYPE_CHECKING:
    from unmask.engine.observe import Observer
    from unmask.models import RowBatch, RowModel
    from unmask.objectives import LossTerms, Objective
    from unmask.parallel.mesh import Mesh


class Losses(NamedTuple):
    """Of a step, over all processes: the loss, columns of the log (mean unweighted nll, rows, routers), and FLOPs."""

    loss: float
    metrics: dict[str, float]
    flops: float


@dataclass
class Gradients:
    """Fills the gradients of a row model's parameters.

    module: what `apply.parallelise` made of it; arithmetic: the context that it runs in; passes: micro-batches that
    every process computes in a step, at least, where it holds parts of the model only.
    """

    row_model: RowModel
    mesh: Mesh
    module: Any
    arithmetic: Callable[[], AbstractContextManager[Any]]
    passes: int
    scaler: torch.amp.GradScaler
    observers: Sequence[Observer] = ()
    _names: dict[type, list[str]] = field(default_factory=dict)

    def accumulate(self, objective: Objective, micro: Sequence[Rows]) -> Losses:
        """Gradients of sum / count into the parameters. micro: of this process's replica."""
        position, routing = self.mesh.position, self.row_model.routing
        is_first_of_pack = position["block"] == position["pipeline"] == 0
        counts = [
            *(sum(rows.count for rows in micro), sum(len(rows) for rows in micro)),
            *(sum(flops(rows, self.row_model.shape) for rows in micro), sum(len(rows.labelled) for rows in micro)),
            sum(len(rows.labelled) > 0 for rows in micro),
        ]
        count, rows, work, labels, learning = self.mesh.sum([each if is_first_of_pack else 0.0 for each in counts])
        if routing is not None:
            routing.weight = self.scaler.scale(torch.ones((), device=self.mesh.device)) / max(learning, 1.0)
        for observer in self.observers:
            observer.begin(micro)
        batches = self._micro_batches(micro, labels > 0)
        sums: dict[str, Any] = dict.fromkeys(("loss", "nll_sum", "labelled"), 0.0)
        computed = self._pipelined if isinstance(self.module, Pipeline) else self._one_by_one
        for number, batch, terms in computed(objective, batches, count or 1.0):
            for name, value in {**terms.metrics, "loss": terms.sum}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
            for observer in self.observers:
                observer.see(number, batch, terms)
        means, routed = self._over_processes(self._named(objective, sums) if labels > 0 else sums)
        loss, nll, labelled = (means.pop(name) for name in ("loss", "nll_sum", "labelled"))
        metrics = {name: value / labelled for name, value in {"nll": nll, **means}.items()} if labelled else {}
        if routing is not None:
            metrics |= routing.read(routed, learning)
        return Losses(loss / (count or 1.0), {**metrics, "rows": round(rows)}, work)

    def _micro_batches(self, micro: Sequence[Rows], labels: bool) -> dict[int, Rows]:
        """What goes through the model, by number. labels: whether any process has some."""
        if not labels:
            return {}
        if not self.mesh.divided:
            # A process that has nothing to learn from still takes its part in the sums.
            learning = {number: rows for number, rows in enumerate(micro) if len(rows.labelled)}
            return learning or dict(enumerate(micro[:1]))
        # Each pass gathers the parameters from all, or is one of a schedule, so all make equally many.
        passes = max(self.passes, int(self.mesh.largest([len(micro)])[0]))
        return dict(enumerate([*micro, *[inert(0.0)] * (passes - len(micro))]))

    def _one_by_one(
        self, objective: Objective, micro: dict[int, Rows], count: float
    ) -> Iterator[tuple[int, RowBatch, LossTerms]]:
        """(number, batch, terms) of each micro-batch, when its gradient has been added."""
        last = max(micro, default=-1)
        for number, rows in micro.items():
            batch = self.row_model.collate(rows)
            with replicas.summing(self.module, number == last):
                with self.arithmetic():
                    terms = self.module(batch, objective)
                self.scaler.scale(terms.sum / count).backward()
            yield number, batch, terms

    def _pipelined(
        self, objective: Objective, micro: dict[int, Rows], count: float
    ) -> Iterator[tuple[int, RowBatch, LossTerms]]:
        """The same when all gradients have been added and summed, where the last stage is; elsewhere nothing."""
        if not micro:
            return
        module, mesh = self.module, self.mesh
        self.scaler.scale(torch.zeros((), device=mesh.device))  # it begins with the first loss, and here may be none
        batches = [self.row_model.collate(rows) for rows in micro.values()]
        if mesh.shards is not None:
            shard.accumulating(module)
        terms = module(batches, objective, lambda loss: self.scaler.scale(loss / count))
        if mesh.shards is not None:
            shard.sum_up(module)
        else:
            replicas.sum_gradients(self.row_model.model.parameters(), mesh.stage, mesh.traffic)
        tied = module.tied_gradient()
        if tied is not None:
            dist.all_reduce(local(tied), group=mesh.ends)
            mesh.traffic.add("parameter gradients", local(tied).nbytes)
        yield from zip(micro, batches, terms, strict=False)

    def _named(self, objective: Objective, sums: dict[str, Any]) -> dict[str, Any]:
        """The sums under the same names on all ranks, of which some may have computed no loss."""
        kind = type(objective)
        if kind not in self._names:
            self._names[kind] = list(dict.fromkeys(name for names in self.mesh.gathered(list(sums)) for name in names))
        return {name: sums.get(name, 0.0) for name in self._names[kind]}

    def _over_processes(self, sums: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
        """(the sums over all processes, those of the routers); the observers take theirs."""
        # Read only now: on a GPU every reading waits for the work before it.
        parts = [[float(value) for value in sums.values()], *(observer.sums() for observer in self.observers)]
        parts.append([] if self.row_model.routing is None else self.row_model.routing.mine())
        total = iter(self.mesh.sum([value for part in parts for value in part]))
        terms, *observed, routed = [[next(total) for _ in part] for part in parts]
        for observer, theirs in zip(self.observers, observed, strict=True):
            observer.take(theirs)
        return dict(zip(sums, terms, strict=True)), routed

    def of(self, besides: Collection[Any] = ()) -> list[Tensor]:
        """The gradients that this process holds, but for those of some parameters."""
        parameters = [each for each in self.row_model.model.parameters() if each not in besides]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def clip(self, limit: float | None) -> float:
        """The norm of the whole gradient, which is scaled down to `limit` where that is smaller."""
        twice = self.module.duplicates() if isinstance(self.module, Pipeline) else set()
        total = square(self.of(twice), self.mesh.device)
        if self.mesh.sizes["pipeline"] > 1:  # of every stage's
            dist.all_reduce(total, group=self.mesh.pipeline)
        norm = total.sqrt()
        if limit:
            meshes: dict[Any, list[torch.nn.Parameter]] = {}
            for parameter in self.row_model.model.parameters():
                meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
            for parameters in meshes.values():
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)


def square(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The square norm of gradients, fp64; of those that are divided, with the parts of other ranks."""
    parts: dict[tuple[Any, ...], list[Tensor]] = {}
    for each in gradients:
        if isinstance(each, DTensor):
            axes = [dim for dim, placement in enumerate(each.placements) if not placement.is_replicate()]
            parts.setdefault((each.device_mesh, *axes), []).append(each.to_local())
        else:
            parts.setdefault((None,), []).append(each)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, *axes), alike in parts.items():
        part = torch.nn.utils.get_total_norm(alike).double().square().to(device)
        for dim in axes:
            dist.all_reduce(part, group=mesh.get_group(dim))
        total += part
    return total
