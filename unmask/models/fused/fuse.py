"""Swap norms, MLPs and rotary attention for the fused kernels, where these are proven (`unmask.models.prove`).

The module and its parameters stay; only `forward` of that instance changes, so names, checkpoints and wrappers do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from unmask.kernels import rms_norm, swiglu_down
from unmask.models.adapters import nf4
from unmask.models.decoder import decoder_layers, spec_of
from unmask.models.fused.rotary_attention import fused_attention, like_llama

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.models.prove import Proofs


class Form(NamedTuple):
    """A fused form that may fit a module: forward takes what the module's own forward takes."""

    kind: str
    name: str
    module: nn.Module
    forward: Callable[..., Any]


def forms(model: PreTrainedModel) -> Iterator[Form]:
    """Every fused form that may fit a module of the model."""
    spec = spec_of(model)
    for name, layer, window in zip(spec.layers, decoder_layers(model), spec.windows, strict=True):
        attention: Any = getattr(layer, "self_attn", None)
        if spec.rotary is not None and like_llama(attention):
            forward = partial(fused_attention, attention, attention.forward, window)
            yield Form("attention", f"{name}.self_attn", attention, forward)
    for name, module in model.named_modules():
        for kind, (applies, fused) in _FUSIONS.items():
            if applies(module):
                yield Form(kind, name, module, partial(fused, module, module.forward))


def fuse(model: PreTrainedModel, proofs: Proofs) -> dict[str, int]:
    """Fuse what is proven; returns how many modules of each kind."""
    count = dict.fromkeys(("attention", *_FUSIONS), 0)
    for form in list(forms(model)):
        if proofs.fits(form):
            form.module.forward = form.forward
            count[form.kind] += 1
    vars(model)["fused"] = count
    return count


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


#: By kind: may a module have it, and its forward(module, original forward, x).
_FUSIONS: dict[str, tuple[Callable[[Any], bool], Callable[..., Tensor]]] = {
    "rms_norm": (_is_rms_norm, _rms_norm),
    "plain_rms_norm": (_is_plain_rms_norm, _plain_rms_norm),
    "swiglu": (_is_swiglu, _swiglu),
}
