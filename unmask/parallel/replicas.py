"""Gradients of all processes, summed: torch's DistributedDataParallel with a sum in place of its mean.

The loss is divided by the global count before backward, so the gradient of the batch is the plain sum over every rank
of every axis, whatever their sizes; nothing is averaged anywhere.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unmask.blocks.exchange import Traffic
from unmask.models.adapters import nf4
from unmask.parallel.shard import passing

# No postponed annotations in this file: torch compares those of a communication hook with its own classes.


@dataclass
class Sums:
    """group: over which gradients are summed (None: all processes); traffic: where their bytes are counted.

    measure: whether `square` adds up the square norm of this process's own gradients, as they go into the sum.
    """

    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    measure: bool = False
    square: Tensor | float = 0.0


class Summed(DistributedDataParallel):
    """What `summed` makes; `sums`: what its hook works with."""

    sums: Sums


def summed(model: nn.Module, device: torch.device, sums: Sums | None = None) -> Summed:
    """The module, its gradients summed over a group in the last backward of a step (see `summing`)."""
    sums = sums or Sums()
    _share_quantised(model, sums.group)
    # With find_unused_parameters the buckets keep their order: a resumed run adds up in the order of the first one.
    wrapped = Summed(
        model,
        process_group=sums.group,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    wrapped.register_comm_hook(sums, _sum)
    wrapped.sums = sums
    return wrapped


def _share_quantised(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """The first rank's weights in four bits, to all: DDP would broadcast values and quantise them again."""
    quantised = {name: each for name, each in model.named_parameters() if nf4.is_nf4(each)}
    for name, parameter in quantised.items():
        for part in nf4.stored(name, parameter.detach()).values():
            dist.broadcast(part, group_src=0, group=group)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(quantised))


def summing(module: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """The context of a forward and backward pass: gradients are summed over processes in the last one of a step."""
    if isinstance(module, FSDPModule):
        passing(module, now)
    return nullcontext() if now or not isinstance(module, DistributedDataParallel) else module.no_sync()


def measure(module: nn.Module, wanted: bool) -> None:
    """Whether `own_square` is to be measured."""
    if isinstance(module, Summed):
        module.sums.measure = wanted


def own_square(module: nn.Module) -> Tensor | float:
    """The square norm of what this process put into the sum since the last call; 0 where that is not measured."""
    if not isinstance(module, Summed):
        return 0.0
    found, module.sums.square = module.sums.square, 0.0
    return found


def _sum(sums: Sums, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    ranks = dist.get_world_size(sums.group)
    # What a ring sends: every part but one to the next rank, once to add up and once to hand round.
    sums.traffic.add("parameter gradients", 2 * (ranks - 1) * gradients.numel() * gradients.element_size() // ranks)
    if sums.measure:
        sums.square = sums.square + torch.linalg.vector_norm(gradients).double().square()
    work = dist.all_reduce(gradients, group=sums.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


#: Bytes of gradients that are summed as one.
BUCKET = 2**25


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, traffic: Traffic) -> None:
    """Sum the gradients of a group's ranks, in place, where no backward pass of one call could do so on its way."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:  # a rank that met no row of it; the sizes of the sums must not differ
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (bucket[0].dtype != parameter.dtype or sum(each.nbytes for each in bucket) > BUCKET):
            _sum_bucket(bucket, group, traffic)
            bucket = []
        bucket.append(parameter.grad)
    _sum_bucket(bucket, group, traffic)


def _sum_bucket(bucket: list[Tensor], group: dist.ProcessGroup, traffic: Traffic) -> None:
    flat, ranks = torch.cat([each.reshape(-1) for each in bucket]), dist.get_world_size(group)
    traffic.add("parameter gradients", 2 * (ranks - 1) * flat.nbytes // ranks)
    dist.all_reduce(flat, group=group)
    for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
        each.copy_(part.view_as(each))
