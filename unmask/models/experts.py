"""Stacked experts of transformers' mixtures (Shazeer et al. 1701.06538), computed expert by expert.

    out[r] = sum over k of weight[r, k] * down[e] (act(gate[e] x[r]) * up[e] x[r]),      e = index[r, k]

The pairs (row, expert) are sorted by expert, so that an expert is two matrix products and none is dropped or padded:
grouped GEMM on a GPU in bf16, else a loop over experts. Sums run in one order whatever the device does. On several
ranks the sorted pairs travel in between: see `unmask.parallel.expert`.

transformers' interfaces for experts are private. They are used here alone: `use_experts_implementation` and what it
leaves on a module, `ALL_EXPERTS_FUNCTIONS`, and the operator `transformers::grouped_mm_fallback`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "unmask"
#: The parameters of a module of experts: [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
PARAMETERS = ("gate_up_proj", "down_proj")
#: What grouped GEMM asks of the sides of a bf16 matrix: rows of 16 bytes.
ALIGNED = 8

Compute = Callable[[Tensor, Tensor], Tensor]


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of stacked experts by name, of any form."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the module beside stacked experts that chooses for them: the one called gate or router, if any."""
    found = {}
    for name in experts_of(model):
        parent = name.rpartition(".")[0]
        beside = model.get_submodule(parent)
        for kind in ("gate", "router"):
            if isinstance(getattr(beside, kind, None), nn.Module):
                found[f"{parent}.{kind}"] = getattr(beside, kind)
    return found


def unfit(module: Any) -> str | None:
    """Why `forward` does not compute a module of experts; None where it does."""
    for flag, wanted in {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False,
                         "is_concatenated": True}.items():  # fmt: skip
        if bool(getattr(module, flag)) != wanted:
            return f"{type(module).__name__} has {flag}={not wanted}"
    if {name for name, _ in module.named_parameters()} != set(PARAMETERS):
        return f"{type(module).__name__} has other parameters than {' and '.join(PARAMETERS)}"
    return None


def use(model: PreTrainedModel) -> bool:
    """Let `forward` compute a model's experts; False where it has none, or some that it does not fit."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found = experts_of(model)
    if not found or any(unfit(module) for module in found.values()):
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
    model.set_experts_implementation(NAME)
    return True


def forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden [N, width], index and weights [N, k] -> [N, width]; what transformers calls in a module's forward."""
    rows, slots = index.shape
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    expert, order = torch.sort(index.flatten(), stable=True)
    every = torch.arange(module.gate_up_proj.shape[0], device=index.device)
    offsets = torch.searchsorted(expert, every, right=True)  # [experts]: where an expert's pairs end
    back = inverse(order)
    pairs = Take.apply(hidden.to(dtype), order // slots, back, slots)

    def compute(pairs: Tensor, offsets: Tensor) -> Tensor:
        gate_up, down = (_local(getattr(module, name)).to(dtype) for name in PARAMETERS)
        gated = module._apply_gate(grouped(pairs, gate_up, offsets))
        return grouped(gated.to(dtype), down, offsets)

    dispatch = getattr(module, "dispatch", None)  # what the experts, wherever they are, make of pairs
    out = compute(pairs, offsets) if dispatch is None else dispatch(compute, pairs, offsets)
    out = Take.apply(out, back, order, 1).view(rows, slots, hidden.shape[1])
    return (out * weights[..., None]).sum(1).to(hidden.dtype)


def grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [P, in] @ weight[e].T of its expert e, weight [experts, out, in]: [P, out]. offsets: see `forward`."""
    transposed = weight.transpose(1, 2)
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.shape[0] and not any(
        side % ALIGNED for side in weight.shape[1:]
    ):  # fmt: skip
        if torch.cuda.get_device_capability(x.device) >= (8, 0):
            return nn.functional.grouped_mm(x, transposed, offs=offsets.int())
    return torch.ops.transformers.grouped_mm_fallback(x, transposed, offsets)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Take(torch.autograd.Function):
    """x[index], where every row of x is taken `times` times; back: where, in groups of `times`, a row went.

    Backward gathers and sums; indexing's own adds up in an order that is the device's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.times = times
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        taken = grad.index_select(0, back)
        if ctx.times > 1:
            taken = taken.view(-1, ctx.times, grad.shape[1]).sum(1)
        return taken, None, None, None


def _local(parameter: Tensor) -> Tensor:
    """The part of divided experts that this rank holds."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
