"""A copy of the model divided over ranks: torch's FSDP2 in the levels of ZeRO (Rajbhandari et al. 1910.02054).

Between steps a rank holds its part of parameters and optimiser state, 1 / (shard x block) of a copy, at every level.
Within a step of several micro-batches the levels differ:

    level   whole parameters               gradients                              sent in a step of m micro-batches
    1       from the first forward on      whole, summed after the last           all-gather     + reduce-scatter
    2       from each forward to its end   divided after each micro-batch         m all-gathers  + m reduce-scatters
    3       one layer at a time            divided after each micro-batch         2m all-gathers + m reduce-scatters

With copies beside (hybrid sharding) the parts are summed over these once a step. All sums are plain: see
`unmask.parallel.replicas`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# What FSDPModule.set_custom_all_gather and set_custom_reduce_scatter take; torch exports no public name for them.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard

from unmask.blocks.exchange import Traffic
from unmask.config import ParallelConfig
from unmask.models import RowModel
from unmask.models.decoder import decoder_layers
from unmask.models.experts import experts_of
from unmask.parallel.expert import divided_dim
from unmask.parallel.mesh import Mesh


@dataclass
class Sharding:
    """How a module is divided. last: whether a step's last micro-batch runs."""

    level: int
    traffic: Traffic
    last: bool = True


def sharded(
    row_model: RowModel, mesh: Mesh, config: ParallelConfig, arithmetic: torch.dtype, root: nn.Module | None = None
) -> Any:
    """The row model itself, or a `root` around it, its parameters now DTensors over `mesh.shards`.

    Each decoder layer is gathered as one, and the root (embeddings, last norm, head) as one for the whole forward: the
    chunked loss reads the head's weight. With an expert axis the experts of a layer are divided by themselves, over the
    ranks that hold the same ones, and so is what has another dtype than its layer (LLaDA2's routers stay fp32 in bf16):
    FSDP2 gathers one dtype at a time. In half precision parameters are gathered in `arithmetic`, gradients summed in
    fp32; the parts are kept as they were.
    """
    assert mesh.shards is not None
    half = arithmetic if arithmetic.itemsize < row_model.model.dtype.itemsize else None
    wide = torch.promote_types(row_model.model.dtype, torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh.shards,
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wide),
        "offload_policy": CPUOffloadPolicy() if config.offload else OffloadPolicy(),
    }
    layers = [layer for layer in decoder_layers(row_model.model) if next(layer.parameters(), None) is not None]
    divided: dict[str, Any] = {**options, "reshard_after_forward": config.level == 3}
    experts = list(experts_of(row_model.model).values()) if mesh.expert_shards is not None else []
    for module in experts:
        fully_shard(module, **{**divided, "mesh": mesh.expert_shards}, shard_placement_fn=_expert_dim(config))
    root = root or row_model
    for layer in layers:
        for module in _of_another_dtype(layer):
            fully_shard(module, **divided)
        fully_shard(layer, **divided)
    for module in _of_another_dtype(root):
        fully_shard(module, **divided)
    fully_shard(root, **{**divided, "reshard_after_forward": False})
    sharding = Sharding(config.level or 1, mesh.traffic)
    cast(Any, root).sharding = sharding
    # A rank whose rows miss an expert adds zeros; without, the sizes of the sums would differ.
    cast(Any, root).set_reduce_scatter_unused_params(True)
    for each in fsdp_modules(root):
        over = mesh.expert_shards if each in experts and mesh.expert_shards is not None else mesh.shards
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)
        each.set_custom_all_gather(_Gather(sharding))
        each.set_custom_reduce_scatter(_Reduce(sharding, over.size(0) if over.ndim > 1 else 1))
    if config.prefetch:
        _prefetch(cast(list[FSDPModule], layers), config.prefetch)
    return root


def passing(module: FSDPModule, last: bool) -> None:
    """What the next forward and backward pass leaves behind; last: it is the last one of a step."""
    sharding: Sharding = cast(Any, module).sharding
    sharding.last = last
    if sharding.level == 1:
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)
    else:
        module.set_requires_all_reduce(last)


def accumulating(module: FSDPModule) -> None:
    """Until `sum_up`, backward passes add to whole gradients, and parameters stay whole."""
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)


def sum_up(module: FSDPModule) -> None:
    """Divide and sum what backward passes have added up, whichever way they ran.

    As torch.distributed.pipelining's stages do: of a schedule that computes weights' gradients apart, FSDP2's own hooks
    see nothing.
    """
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    state: Any = cast(Any, fully_shard).state(module)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def rest(module: nn.Module) -> None:
    """Divide again what a forward without a backward has left whole: it would not follow the weights."""
    for each in fsdp_modules(module):
        each.reshard()


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _of_another_dtype(module: nn.Module) -> list[nn.Module]:
    """The modules below, but for divided ones, with parameters of their own in another dtype than most numbers have."""
    within = [*_undivided(module)]
    count: Counter[torch.dtype] = Counter()
    for parameter in {own for each in within for own in each.parameters(recurse=False)}:
        count[parameter.dtype] += parameter.numel()
    usual = max(count, key=lambda dtype: count[dtype], default=None)
    return [each for each in within if any(own.dtype != usual for own in each.parameters(recurse=False))]


def _undivided(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _undivided(child)


def _expert_dim(config: ParallelConfig) -> Callable[[nn.Parameter], Shard]:
    """Which dimension of a rank's experts is divided."""

    def placement(parameter: nn.Parameter) -> Shard:
        held = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return Shard(divided_dim(held, config.expert_shards))

    return placement


def _prefetch(layers: list[FSDPModule], ahead: int) -> None:
    """Gather `ahead` layers before they run, in the forward and in the backward pass."""
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - ahead) : number][::-1])


class _Gather(DefaultAllGather):
    """All-gather, its bytes counted: a part goes to every other rank."""

    def __init__(self, sharding: Sharding):
        self.traffic = sharding.traffic

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.traffic.add("parameters", (group.size() - 1) * input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _Reduce(DefaultReduceScatter):
    """Reduce-scatter, its bytes counted with those of the sum over copies that follows.

    copies: of what is divided. On a CPU by an all-to-all and sums in the order of the ranks: gloo's own takes 1.5 to
    2.5 times as long.
    """

    def __init__(self, sharding: Sharding, copies: int):
        self.sharding, self.copies = sharding, copies

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        size, copies = output_tensor.nbytes, self.copies
        over_copies = 2 * (copies - 1) * size // copies if self.sharding.last else 0
        self.sharding.traffic.add("parameter gradients", (group.size() - 1) * size + over_copies)
        if input_tensor.device.type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        return torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
