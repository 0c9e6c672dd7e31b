"""Tensor and sequence parallelism of one decoder: Shoeybi et al. 1909.08053 and Korthikanti et al. 2205.05198.

    embedding   rows of the vocabulary held here, summed        all rows
    layers      norms and residuals                             1 / T of the rows
      region    gather rows > column-parallel > row-parallel > reduce-scatter rows      (self_attn, mlp)
    head        gather rows > cross-entropy of the vocabulary held here

Which linear layers are divided how is transformers' own tensor plan of the model. The parameters become DTensors on the
`tensor` axis, so that FSDP2, clipping, optimisers and checkpoints know what they hold; modules compute on the local
tensors, so that kernels do not. Rows are padded with zeros to a multiple of the axis where they are divided, which
attention never sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from unmask.blocks.exchange import Traffic
from unmask.errors import UserError
from unmask.kernels import VocabularyShard
from unmask.models import RowModel
from unmask.models.decoder import spec_of
from unmask.models.prove import BUILT_DIFFERENTLY, close, miniature, trial_rows
from unmask.models.tensor_plan import TensorPlan
from unmask.parallel.mesh import part_of


@dataclass
class TensorAxis:
    """The ranks that a layer is divided over. rows: of the pack that the model is running on."""

    mesh: DeviceMesh
    traffic: Traffic
    rows: int = 0

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def count(self, size: int) -> None:
        """`size` more bytes sent."""
        self.traffic.add("tensor", size)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of whole [1, N, width]: [1, ceil(N / size), width], zeros after the last row."""
        own = -(-whole.shape[1] // self.size)
        start = min(self.rank * own, whole.shape[1])
        rows = whole[:, start : start + own]
        return nn.functional.pad(rows, (0, 0, 0, own - rows.shape[1])).contiguous()

    def gathered(self, part: Tensor, rows: int) -> Tensor:
        """The opposite: [1, rows, width]."""
        whole = part.new_empty((self.size * part.shape[1], part.shape[2]))
        dist.all_gather_single(whole, part[0].contiguous(), group=self.group)
        self.count((self.size - 1) * part.nbytes)
        return whole[None, :rows]

    def reduced(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' whole [1, N, width]."""
        own = -(-whole.shape[1] // self.size)
        padded = nn.functional.pad(whole[0], (0, 0, 0, own * self.size - whole.shape[1])).contiguous()
        self.count((self.size - 1) * padded.nbytes // self.size)
        if padded.device.type == "cpu":  # as FSDP2's sums are made: gloo's own reduce-scatter takes longer
            parts = torch.empty_like(padded)
            dist.all_to_all_single(parts, padded, group=self.group)
            return parts.view(self.size, own, -1).sum(0)[None]
        part = padded.new_empty((own, padded.shape[1]))
        dist.reduce_scatter_single(part, padded, group=self.group)
        return part[None]

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        total = x.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        self.count(2 * (self.size - 1) * total.nbytes // self.size)
        return total


class _Gather(torch.autograd.Function):
    """Part to whole. partial: the ranks' gradients of the whole are summands, else they are all the same."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: TensorAxis, partial: bool) -> Tensor:
        ctx.axis, ctx.partial = axis, partial
        return axis.gathered(part, axis.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.axis.reduced(grad) if ctx.partial else ctx.axis.part(grad)), None, None


class _Scatter(torch.autograd.Function):
    """Whole to part. partial: the ranks' wholes are summands, else they are all the same."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis, partial: bool) -> Tensor:
        ctx.axis, ctx.rows = axis, whole.shape[1]
        return axis.reduced(whole) if partial else axis.part(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.gathered(grad, ctx.rows), None, None


class _Sum(torch.autograd.Function):
    """Summands to their sum, whose gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, axis: TensorAxis) -> Tensor:
        return axis.summed(summand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class Across:
    """The axis, for a model that works on whole rows between its embedding and its layers."""

    def __init__(self, axis: TensorAxis):
        self.axis, self.group = axis, axis.group

    def part(self, whole: Tensor) -> Tensor:
        return _Scatter.apply(whole, self.axis, False)

    def held(self, whole: Tensor) -> Tensor:
        each = -(-whole.shape[1] // self.axis.size)
        return whole[:, self.axis.rank * each :][:, :each]

    def summed(self, summand: Tensor) -> Tensor:
        return _Sum.apply(summand, self.axis)


def divide(row_model: RowModel, axis: TensorAxis) -> None:
    """Divide the row model over the axis, in place: every parameter becomes a DTensor.

    UserError where its miniature, divided, does not give what it gave before.
    """
    if not _proven(RowModel(miniature(row_model.model, axis.size)).eval(), replace(axis, traffic=Traffic())):
        raise UserError(
            f"parallel.model_parallel_size: {row_model.decoder.kind} computes something else when it is divided by "
            f"transformers' plan, so unmask does not divide it; set it to 1"
        )
    _divide(row_model, axis)


@torch.no_grad()
def _proven(trial: RowModel, axis: TensorAxis) -> bool:
    batch = trial.collate(trial_rows())
    before = trial.hidden(batch)
    _divide(trial, axis)
    try:
        return close(trial.hidden(batch), before)
    except BUILT_DIFFERENTLY:
        return False


def _divide(row_model: RowModel, axis: TensorAxis) -> None:
    model = row_model.model
    plan, base = _plan(model), model.base_model
    if hasattr(base, "across"):
        base.across = Across(axis)
    embedding = model.get_input_embeddings()
    dims = divided_dims(model)
    summands = {base.get_submodule(name) for name in plan.rows}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for name, parameter in own.items():
            if parameter not in made:  # tied weights stay tied
                placement = Shard(dims[parameter]) if parameter in dims else Replicate()
                made[parameter] = part_of(parameter, axis.mesh, placement)
            module.register_parameter(name, made[parameter])
        if own:
            _compute_locally(module, list(own), axis.size if module in summands else 1)
    start = axis.rank * -(-embedding.num_embeddings // axis.size)
    row_model.vocabulary_shard = VocabularyShard(start, embedding.num_embeddings, axis.group, axis.count)
    embedding.forward = partial(_embedded, embedding, embedding.forward, axis, start)
    # After the hooks that are there: noise on the mask token is added to whole rows.
    embedding.register_forward_hook(lambda module, args, out: _Scatter.apply(out, axis, False))
    for name in plan.regions:
        region = base.get_submodule(name)
        region.register_forward_pre_hook(partial(_enter, axis), with_kwargs=True)
        region.register_forward_hook(partial(_leave, axis))
    base.register_forward_pre_hook(partial(_begin, axis), with_kwargs=True)
    base.register_forward_hook(partial(_end, axis))


def _plan(model: Any) -> TensorPlan:
    plan = spec_of(model).tensor
    assert isinstance(plan, TensorPlan), plan  # the rules of the config have refused it
    return plan


def divided_dims(model: Any) -> dict[nn.Parameter, int]:
    """The dimension in which a parameter is divided; those that are not in it every rank holds whole."""
    plan, base = _plan(model), model.base_model
    columns = [base.get_submodule(name) for name in plan.columns]
    columns += [model.get_input_embeddings(), model.get_output_embeddings()]
    rows = [base.get_submodule(name)._parameters["weight"] for name in plan.rows]
    return {
        **{own: 0 for module in columns for own in module._parameters.values() if own is not None},
        **dict.fromkeys(rows, 1),
    }


def _compute_locally(module: nn.Module, names: list[str], ranks: int) -> None:
    """Let `module.weight` be the local tensor of the DTensor that is its parameter.

    As in torchtitan's simple_fsdp, a property of a class of the module's own: names and checkpoints stay. ranks: that
    add up their outputs, each with its share of the bias.
    """
    namespace = {name: property(partial(_local, name, ranks if name == "bias" else 1)) for name in names}
    module.__class__ = type(type(module).__name__, (type(module),), namespace)


def _local(name: str, share: int, module: nn.Module) -> Tensor:
    parameter: Any = module._parameters[name]
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
        return parameter  # FSDP2 holds it, divided further: nobody computes with it now
    # Each rank sees some of the rows or heads that a replicated parameter is applied to.
    own = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    local = parameter.to_local(grad_placements=own)
    return local if share == 1 else local / share


def _embedded(
    module: nn.Module, lookup: Callable[[Tensor], Tensor], axis: TensorAxis, start: int, token: Tensor
) -> Tensor:
    """Embeddings of token ids [1, N], of which this rank holds those from `start` on: [1, N, width]."""
    index = token - start
    held = (index >= 0) & (index < cast(Tensor, module.weight).shape[0])
    own = lookup(torch.where(held, index, 0))
    return _Sum.apply(torch.where(held[..., None], own, 0.0), axis)


def _begin(axis: TensorAxis, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    axis.rows = kwargs["position_ids"].shape[1]


def _end(axis: TensorAxis, module: nn.Module, args: Any, output: Any) -> Any:
    output.last_hidden_state = _Gather.apply(output.last_hidden_state, axis, False)
    return output


def _enter(axis: TensorAxis, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """All rows, for a module that takes hidden states first, by place or by name."""
    if args:
        return (_Gather.apply(args[0], axis, True), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _Gather.apply(kwargs["hidden_states"], axis, True)}


def _leave(axis: TensorAxis, module: nn.Module, args: Any, output: Any) -> Any:
    """This rank's rows of the sum of the ranks' outputs."""
    if isinstance(output, tuple):
        return (_Scatter.apply(output[0], axis, True), *output[1:])
    return _Scatter.apply(output, axis, True)
