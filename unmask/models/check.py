"""Refuse models whose attention does not go through the interface, before anything is trained with a wrong mask.

A short forward with a plan that only records tells, for every decoder layer, whether its attention asked the
interface, and with which sliding window. Linear attention and state-space layers never ask; soft-capped scores and
attention sinks ask for things `attend` does not compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from unmask.attention.interface import MissingPlan
from unmask.errors import UserError, counted
from unmask.models.positions import limit_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Attention(NamedTuple):
    """One layer's: its sliding window (None: full), heads of queries and of keys, and the width of a head."""

    window: int | None
    heads: int
    kv_heads: int
    head_dim: int


class Probe:
    """A plan that answers with zeros and remembers who asked."""

    def __init__(self) -> None:
        self.asked: dict[nn.Module, Attention] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, None]:
        if value.shape[3] != key.shape[3]:
            kind = f"{type(module).__name__} has keys of width {key.shape[3]} and values of width {value.shape[3]}"
            raise UserError(f"{kind}: attend needs one width, so unmask cannot train it")
        self.asked[module] = Attention(window, query.shape[1], key.shape[1], query.shape[3])
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order; UserError when the model has no such list."""
    layers = getattr(model.base_model, "layers", None)
    if not layers:
        raise UserError(f"{type(model).__name__} has no decoder layers that unmask knows (base_model.layers)")
    return list(layers)


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of every layer's attention (None: full)."""
    return [attention.window for attention in layer_attention(model)]


def layer_attention(model: PreTrainedModel) -> list[Attention]:
    """Every layer's attention, from a probing forward of two tokens."""
    probe = Probe()
    device = model.get_input_embeddings().weight.device
    token = torch.zeros((1, 2), dtype=torch.long, device=device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model.base_model(
                input_ids=token, position_ids=torch.arange(2, device=device)[None], plan=probe, use_cache=False
            )
    except MissingPlan:
        raise UserError(f"{type(model).__name__} hands no plan to its attention: unmask cannot train it") from None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{type(model).__name__}: a trial of two tokens fails with this config: {reason}") from error
    finally:
        model.train(training)
    found = []
    for number, layer in enumerate(decoder_layers(model)):
        asked = [probe.asked[module] for module in layer.modules() if module in probe.asked]
        if len(asked) != 1:
            kind = _kind(model, number, layer)
            raise UserError(f"layer {number} ({kind}) bypasses the attention interface: unmask cannot train it")
        window = asked[0].window
        if window is not None and window < 1:
            raise UserError(f"layer {number} has a sliding window of {window} tokens: it must be at least 1")
        found.append(asked[0])
    return found


def check_positions(model: PreTrainedModel, longest: int, where: str, key: str) -> None:
    """UserError when a document of `longest` tokens has more than the positions that the model was made for.

    Positions count from 0 in every document, so it is not the length of a pack that matters. key: what cuts documents.
    """
    limit = limit_of(model.config)
    if limit is not None and longest > limit.tokens:
        raise UserError(
            f"{where}: a document (or the part of one that a pack holds) has {counted(longest, 'token')}, and the "
            f"model {counted(limit.tokens, 'position')} ({limit.name}): set {key} to {limit.tokens} or less"
        )


def check_attention(model: PreTrainedModel) -> None:
    """UserError, naming the layer or the setting, when `attend` would not compute this model's attention."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    for number, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(f"layer {number} is {kind}: unmask trains full and sliding attention only")
    if softcap := getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"model config attn_logit_softcapping={softcap}: attend does not compute it; set it to 0 or null"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn") and isinstance(getattr(module, "sinks", None), nn.Parameter):
            raise UserError(f"{name} uses attention sinks, which attend does not compute")
    for attention in layer_attention(model):
        heads, kv_heads = attention.heads, attention.kv_heads
        if heads % kv_heads:
            raise UserError(
                f"model config num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )


def _kind(model: PreTrainedModel, number: int, layer: nn.Module) -> str:
    types: Any = getattr(model.config.get_text_config(), "layer_types", None)
    return types[number] if types else type(layer).__name__
