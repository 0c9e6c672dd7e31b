"""Frozen weights in four bits: NF4 with double quantisation (QLoRA, Dettmers 2305.14314), in torchao's tensors.

    W = s_b c[q],    s_b = mean + z_b / f_g

b is a block of 64 weights with the scale s_b, c the 16 levels of NF4 (to four digits, torchao's), q their index (4
bits); z_b (8 bits) is the scale within a group g of at most 256 blocks, f_g the factor of the group. A product takes W
in the dtype of its input, and takes it again in the backward pass; W itself has no gradient.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unmask.errors import UserError

#: Weights that share a scale, and at most so many scales that share a factor.
BLOCK, GROUP = 64, 256
#: Where a weight is small its groups are, so that there are this many: as many ranks may divide it.
GROUPS = 8
#: Parts that are divided with the weight, each from end to end.
DIVIDED = ("quantized_data", "quantized_scalers", "quantization_factor")
_TORCHAO = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"


def kind() -> Any:
    """torchao's NF4Tensor; UserError where it is not installed, or cannot be imported."""
    try:
        return import_module(_TORCHAO).NF4Tensor
    except ImportError as error:
        raise UserError(
            f"model.lora.quantize=nf4 needs torchao >= 0.18 (pip install 'unmask[quant]'): {error}"
        ) from None


def is_nf4(tensor: Any) -> bool:
    """Whether a weight is in four bits; torchao is not imported to find out."""
    module = sys.modules.get(_TORCHAO)
    return module is not None and isinstance(tensor, module.NF4Tensor)


@torch.no_grad()
def stored(name: str, tensor: Any) -> dict[str, Any]:
    """What is kept of a tensor, by name: of one in four bits its parts, which share its memory, divided as it is."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_nf4(own):
        return {name: tensor}
    found = {part: value.detach() for part, value in _parts(own)}
    if own is not tensor:
        mesh, placements = tensor.device_mesh, tensor.placements
        found |= {part: DTensor.from_local(found[part], mesh, placements, run_check=False) for part in DIVIDED}
    return {f"{name}.{part}": value for part, value in found.items()}


def check_divisible(model: nn.Module, ranks: int) -> None:
    """UserError for weights in four bits that FSDP2 cannot give in equal parts to so many ranks."""
    for name, parameter in model.named_parameters():
        if not is_nf4(parameter):
            continue
        sizes = [parameter.shape[0], *(value.numel() for part, value in _parts(parameter) if part in DIVIDED)]
        if any(size % ranks for size in sizes):
            raise UserError(
                f"model.lora.quantize=nf4: {name} of {tuple(parameter.shape)} is in four bits and cannot be divided "
                f"into {ranks} equal parts: use fewer ranks (parallel.shard_size), or quantize=none"
            )


def quantize(module: nn.Linear, where: str, device: Any, values: bool = True) -> None:
    """Put a module's weight [out, in] in four bits on `device`. values: else its parts are there, unfilled.

    UserError for a weight whose size is no multiple of a block; `where` names it.
    """
    weight = module.weight.detach()
    blocks, rest = divmod(weight.numel(), BLOCK)
    if rest or not blocks:
        raise UserError(
            f"model.lora.quantize=nf4: {where} has {weight.numel():,} weights, no multiple of {BLOCK}: leave "
            f"{where.split('.')[-1]} out of model.lora.targets"
        )
    group = math.gcd(blocks if blocks % GROUPS else blocks // GROUPS, GROUP)
    made = kind().from_tensor(weight.to(device if values else "meta"), BLOCK, group)
    if not values:
        _, how = made.__tensor_flatten__()
        how["tensor_meta"] = replace(how["tensor_meta"], device=torch.device(device))
        empty = {part: torch.empty_like(value, device=device) for part, value in _parts(made)}
        made = kind().__tensor_unflatten__(empty, how, None, None)
    # peft freezes it, by whose requires_grad adapters are found.
    module.weight = nn.Parameter(made, requires_grad=module.weight.requires_grad)


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Weights in four bits become plain ones of the same values."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_nf4(weight := cast(Any, module.weight)):
            module.weight = nn.Parameter(weight.get_original_weight(), requires_grad=weight.requires_grad)


def _parts(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    for name in tensor.__tensor_flatten__()[0]:
        yield name, getattr(tensor, name)
