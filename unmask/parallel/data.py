"""Gradients of all processes, summed: torch's DistributedDataParallel with a sum in place of its mean.

The loss is divided by the global count before backward, so the gradient of the batch is the plain sum over every rank
of every axis, whatever their sizes; nothing is averaged anywhere.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# No postponed annotations in this file: torch compares those of a communication hook with its own classes.


def summed(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """The module, its gradients summed over the group in the last backward of a step (see `no_sync`)."""
    # With find_unused_parameters the buckets keep their order: a resumed run adds up in the order of the first one.
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    wrapped.register_comm_hook(group, _sum)
    return wrapped


def summing(module: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """The context of a forward and backward pass: gradients are summed over processes in the last one of a step."""
    return nullcontext() if now or not isinstance(module, DistributedDataParallel) else module.no_sync()


def _sum(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
