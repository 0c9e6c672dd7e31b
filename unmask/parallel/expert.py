"""Expert parallelism: the experts of every layer divided over ranks, rows sent to them (Lepikhin et al. 2006.16668).

    pairs (row, expert), sorted by expert > all-to-all to the expert's rank > its experts > all-to-all back > combined

The axis is carved from replicate x shard x block: neighbours among these ranks, which compute different rows, hold
different experts, and ranks that are a multiple of the axis apart hold the same ones. An expert's gradient is summed
over the latter alone, for it has met the rows of all of its group; everything else is summed over all ranks. The
parameters become DTensors on the axis, so that FSDP2, clipping, optimisers and checkpoints know what a rank holds.
There is no capacity: what routers ask for is sent, however uneven, and nothing is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from unmask.blocks.exchange import Traffic
from unmask.models.experts import PARAMETERS, Compute, Take, experts_of, inverse
from unmask.parallel.mesh import part_of


@dataclass
class ExpertAxis:
    """The ranks that hold one set of all experts; see `unmask.models.experts.forward`."""

    mesh: DeviceMesh
    traffic: Traffic

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def __call__(self, compute: Compute, pairs: Tensor, offsets: Tensor) -> Tensor:
        """pairs [P, hidden], sorted by expert -> what their experts make of them; also with P = 0, by all ranks."""
        counts = offsets.diff(prepend=offsets.new_zeros(1)).view(self.mesh.size(), -1)  # [ranks, experts of each]
        asked = torch.empty_like(counts)  # [ranks, experts held here]
        dist.all_to_all_single(asked, counts, group=self.group)
        sends, takes = counts.sum(1).tolist(), asked.sum(1).tolist()
        here = _Exchange.apply(pairs, sends, takes, self)
        # They arrive rank by rank, and by expert within a rank.
        every = torch.arange(asked.shape[1], device=pairs.device).repeat(len(asked))
        order = torch.sort(every.repeat_interleave(asked.flatten()), stable=True).indices
        back = inverse(order)
        out = compute(Take.apply(here, order, back, 1), asked.sum(0).cumsum(0))
        return _Exchange.apply(Take.apply(out, back, order, 1), takes, sends, self)

    def exchanged(self, rows: Tensor, sends: list[int], takes: list[int]) -> Tensor:
        """rows [sum(sends), width], in order of the ranks they go to -> [sum(takes), width], of those they are from."""
        found = rows.new_empty((sum(takes), rows.shape[1]))
        dist.all_to_all_single(found, rows.contiguous(), takes, sends, group=self.group)
        away = sum(sends) - sends[self.mesh.get_local_rank()]
        self.traffic.add("experts", away * rows.shape[1] * rows.element_size())
        return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], takes: list[int], axis: ExpertAxis) -> Tensor:
        ctx.sends, ctx.takes, ctx.axis = sends, takes, axis
        return axis.exchanged(rows, sends, takes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.exchanged(grad, ctx.takes, ctx.sends), None, None, None


def divide(model: nn.Module, axis: ExpertAxis) -> None:
    """Every rank keeps its experts."""
    for module in experts_of(model).values():
        for name in PARAMETERS:
            parameter = getattr(module, name)
            setattr(module, name, part_of(parameter, axis.mesh, Shard(0)))
        module.dispatch = axis  # type: ignore[assignment]


def divided_dim(shape: torch.Size | list[int], shards: int) -> int:
    """The dimension of a rank's experts [experts, out, in] that FSDP2 divides: the first that `shards` divides."""
    return next((dim for dim, size in enumerate(shape) if size % shards == 0), 0)
