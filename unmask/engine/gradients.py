"""The gradient of a step: forward and backward over its micro-batches, summed over processes, and clipped.

The loss of a step is sum(weight * nll) / sum(count) over all its packs: the counts are known from the rows before the
first backward pass, so accumulation and any number of ranks give the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from unmask.engine.noise_scale import NoiseScale, square
from unmask.parallel import replicas as data
from unmask.parallel import shard
from unmask.parallel.pipeline import Pipeline
from unmask.rows import Rows, flops, inert

if TYPE_CHECKING:
    from unmask.engine.levels import LevelLosses
    from unmask.models import RowBatch, RowModel
    from unmask.models.routing import Routing
    from unmask.objectives import LossTerms, Objective
    from unmask.parallel.mesh import Mesh


@dataclass
class Gradients:
    """Fills the gradients of a row model's parameters.

    module: what `apply.parallelise` made of it; arithmetic: the context it runs in; passes: micro-batches that every
    process computes in a step, where it holds parts of the model only.
    """

    row_model: RowModel
    mesh: Mesh
    module: Any
    arithmetic: Callable[[], AbstractContextManager[Any]]
    passes: int
    scaler: torch.amp.GradScaler
    levels: LevelLosses
    noise: NoiseScale | None = None
    _names: list[str] | None = None

    @property
    def routing(self) -> Routing | None:
        return self.row_model.routing

    def accumulate(self, objective: Objective, micro: list[Rows]) -> tuple[float, dict[str, float]]:
        """Gradients of sum / count into the parameters; returns the loss, and the mean of the unweighted nll, rows and
        FLOPs of all processes. micro: of this process's replica."""
        position = self.mesh.position
        counts = position["block"] == position["pipeline"] == 0
        work = sum(flops(rows, self.row_model.shape) for rows in micro)
        labels = sum(len(rows.labelled) for rows in micro)
        own = [sum(rows.count for rows in micro), sum(len(rows) for rows in micro), work, labels]
        own.append(sum(len(rows.labelled) > 0 for rows in micro))
        count, rows_in_all, work, labels_in_all, learning = self.mesh.sum([value if counts else 0.0 for value in own])
        if self.routing is not None:
            self.routing.weight = self.scaler.scale(torch.ones((), device=self.mesh.device)) / max(learning, 1.0)
        micro, passed = self._passes(micro, labels_in_all > 0)
        sums: dict[str, Any] = dict.fromkeys(("loss", "nll_sum", "labelled"), 0.0)
        one_by_one = self._pipelined if isinstance(self.module, Pipeline) else self._one_by_one
        for number, batch, terms in one_by_one(objective, micro, passed, count or 1.0):
            for name, value in {"loss": terms.sum, **terms.metrics}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
            if len(micro[number].labelled):
                self.levels.see(number, batch.held, terms.nll)
        sums = self._named(sums)
        # Read only now: on a GPU every reading waits for the work before it.
        own = [float(value) for value in sums.values()]
        means = dict(zip(sums, self._sum_up(own, len(passed) if labels else 0, counts), strict=True))
        metrics = {"nll": means["nll_sum"] / means["labelled"]} if means.get("labelled") else {}
        if self.routing is not None:
            metrics |= self.routing.read(self.mesh.sum(self.routing.mine()), learning)
        return means["loss"] / (count or 1.0), {**metrics, "rows": round(rows_in_all), "flops": work}

    def _one_by_one(
        self, objective: Objective, micro: list[Rows], passed: list[int], count: float
    ) -> Iterator[tuple[int, RowBatch, LossTerms]]:
        """(number, batch, terms) of each micro-batch, when its gradient has been added."""
        for number in passed:
            batch = self.row_model.collate(micro[number])
            with data.summing(self.module, number == passed[-1]):
                with self.arithmetic():
                    terms = self.module(batch, objective)
                self.scaler.scale(terms.sum / count).backward()
            if self.noise is not None and number == passed[0] != passed[-1]:
                self.noise.see(square(self._parts()))
            yield number, batch, terms

    def _pipelined(
        self, objective: Objective, micro: list[Rows], passed: list[int], count: float
    ) -> Iterator[tuple[int, RowBatch, LossTerms]]:
        """The same when all gradients have been added and summed, where the last stage is; elsewhere nothing."""
        if not passed:
            return
        module, mesh = self.module, self.mesh
        self.scaler.scale(torch.zeros((), device=mesh.device))  # it begins with the first loss, and here may be none
        batches = [self.row_model.collate(micro[number]) for number in passed]
        if mesh.shards is not None:
            shard.accumulating(module)
        found = module(batches, objective, lambda loss: self.scaler.scale(loss / count))
        if mesh.shards is not None:
            shard.sum_up(module)
        else:
            data.sum_gradients(self.row_model.model.parameters(), mesh.stage, mesh.traffic)
        tied = module.tied_gradient()
        if tied is not None:
            local = tied.to_local() if isinstance(tied, DTensor) else tied
            dist.all_reduce(local, group=mesh.ends)
            mesh.traffic.add("parameter gradients", local.nbytes)
        yield from zip(passed, batches, found, strict=False)

    def _named(self, sums: dict[str, Any]) -> dict[str, Any]:
        """The sums under the same names on all ranks: in a pipeline only the last stage has those of a loss."""
        if self.mesh.sizes["pipeline"] == 1:
            return sums
        if self._names is None:
            self._names = list(dict.fromkeys(name for names in self.mesh.gathered(list(sums)) for name in names))
        return {name: sums.get(name, 0.0) for name in self._names}

    def _passes(self, micro: list[Rows], labels: bool) -> tuple[list[Rows], list[int]]:
        """(micro-batches, the numbers of those that go through the model). labels: whether any process has some."""
        if not labels:
            return micro, []
        if not self.mesh.divided:
            # A process that has nothing to learn from still takes its part in the sums.
            return micro, [n for n, rows in enumerate(micro) if len(rows.labelled)] or [0][: len(micro)]
        # Each pass gathers the parameters from all, or is one of a schedule, so all make equally many.
        return micro + [inert(0.0)] * (self.passes - len(micro)), list(range(self.passes))

    def _sum_up(self, own: list[float], parts: int, counts: bool) -> list[float]:
        """The sums of `own` over all processes; those of the loss by level and of the noise scale go the same way.

        parts: micro-batches with labels, of this process; counts: whether it speaks for its packs.
        """
        levels = self.levels.mine(counts)
        noise = [] if self.noise is None else self.noise.mine(data.own_square(self.module), parts)
        found = self.mesh.sum([*own, *levels, *noise])
        end = len(own) + len(levels)
        self.levels.take(found[len(own) : end])
        if self.noise is not None:
            self.noise.take(found[end:], self.scaler.get_scale())
        return found[: len(own)]

    def _parts(self, besides: Collection[Any] = ()) -> list[torch.Tensor]:
        parameters = [each for each in self.row_model.model.parameters() if each not in besides]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def clip(self, limit: float | None) -> float:
        """The norm of the whole gradient, which is scaled down to `limit` where that is smaller."""
        twice = self.module.duplicates() if isinstance(self.module, Pipeline) else set()
        square = _square(self._parts(twice), self.mesh.device)
        if self.mesh.sizes["pipeline"] > 1:  # of every stage's
            dist.all_reduce(square, group=self.mesh.pipeline)
        norm = square.sqrt()
        if limit:
            meshes: dict[Any, list[torch.nn.Parameter]] = {}
            for parameter in self.row_model.model.parameters():
                meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
            for parameters in meshes.values():
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)


def _square(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The square norm of gradients, fp64; of those that are divided, with the parts of other ranks."""
    parts: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for each in gradients:
        if isinstance(each, DTensor):
            axes = [dim for dim, placement in enumerate(each.placements) if not placement.is_replicate()]
            parts.setdefault((each.device_mesh, *axes), []).append(each.to_local())
        else:
            parts.setdefault((None,), []).append(each)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, *axes), alike in parts.items():
        square = torch.nn.utils.get_total_norm(alike).double().square().to(device)
        for dim in axes:
            dist.all_reduce(square, group=mesh.get_group(dim))
        total += square
    return total
