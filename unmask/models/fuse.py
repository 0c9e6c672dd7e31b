"""Swap norms, MLPs and rotary attention for the fused kernels, each only after it gave the module's own result.

The module and its parameters stay; only `forward` of that instance changes, so names, checkpoints and wrappers do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from unmask.kernels import rms_norm, swiglu_down
from unmask.models import nf4
from unmask.models.decoder import decoder_layers, spec_of
from unmask.models.rotary_attention import BUILT_DIFFERENTLY, fuse_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Fusion(NamedTuple):
    """applies: may this module be fused; width: of its input; forward(module, original forward, x): the fused form."""

    applies: Callable[[Any], bool]
    width: Callable[[Any], int]
    forward: Callable[[Any, Callable[..., Tensor], Tensor], Tensor]


def fuse(model: PreTrainedModel) -> dict[str, int]:
    """Fuse every module that has a proven kernel; returns how many of each kind."""
    fused = dict.fromkeys(("attention", *_FUSIONS), 0)
    rotary = getattr(model.base_model, "rotary_emb", None)
    for layer, window in zip(decoder_layers(model), spec_of(model).windows, strict=True):
        attention = getattr(layer, "self_attn", None)
        fused["attention"] += rotary is not None and fuse_attention(attention, window, rotary)
    like = model.get_input_embeddings().weight
    for module in model.modules():
        for kind, fusion in _FUSIONS.items():
            if fusion.applies(module) and _agrees(module, fusion, like):
                module.forward = partial(fusion.forward, module, module.forward)
                fused[kind] += 1
    return fused


def _is_rms_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight") and _epsilon(module) > 0


def _epsilon(module: Any) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))


def _rms_norm(module: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, _epsilon(module))


def _is_plain_rms_norm(module: Any) -> bool:
    name = type(module).__name__
    return name.endswith("RMSNorm") and getattr(module, "with_scale", True) is False and _epsilon(module) > 0


def _plain_rms_norm(module: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], eps=_epsilon(module))


def _is_swiglu(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        hasattr(module, "act_fn")
        and all(type(part) is nn.Linear for part in parts)
        and module.down_proj.bias is None
        and not nf4.is_nf4(module.down_proj.weight)
    )


def _swiglu(module: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    # An adapter (LoRA) that replaced the projection since then must not be bypassed.
    if type(module.down_proj).forward is not nn.Linear.forward:
        return original(x)
    return swiglu_down(module.gate_proj(x), module.up_proj(x), module.down_proj.weight)


@torch.no_grad()
def _agrees(module: nn.Module, fusion: _Fusion, like: Tensor) -> bool:
    """like: has the dtype and the device of a module without parameters."""
    parameter = next(module.parameters(), like)
    if parameter.device.type == "meta":
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 3, fusion.width(module)), generator=generator).to(parameter.device, parameter.dtype)
    try:
        expected = module.forward(x)
    except BUILT_DIFFERENTLY:
        return False
    # In fp64 too: transformers' norms round to fp32 whatever the dtype, ours do not.
    tolerance = 1e-5 if parameter.dtype in (torch.float64, torch.float32) else 2e-2
    return torch.allclose(fusion.forward(module, module.forward, x), expected, rtol=tolerance, atol=tolerance)


_FUSIONS = {
    "rms_norm": _Fusion(_is_rms_norm, lambda module: module.weight.shape[0], _rms_norm),
    "plain_rms_norm": _Fusion(_is_plain_rms_norm, lambda module: 8, _plain_rms_norm),
    "swiglu": _Fusion(_is_swiglu, lambda module: module.gate_proj.in_features, _swiglu),
}
