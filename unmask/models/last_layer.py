"""The last layer for labelled rows only: keys and values of all rows, everything else of the rows the head will read.

Nothing after the last attention mixes rows, so queries, output projection and MLP of unlabelled rows are never used.
Saves about three quarters of one layer (12-17 % of a 4-layer model). Taken only for layers built like Llama's, and only
after it gave the layer's own result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unmask.attention import Plan, attend
from unmask.rows import Stream, assemble


def skip_unlabelled(layer: nn.Module, window: int | None, rotary: nn.Module) -> bool:
    """Make `layer` compute labelled rows only when the plan asks for it; False when that is not proven for it."""
    if not _like_llama(layer):
        return False
    original = layer.forward
    layer.forward = partial(_forward, layer, original, window)
    if _agrees(layer, original, window, rotary):
        return True
    layer.forward = original
    return False


def _like_llama(layer: nn.Module) -> bool:
    attention = getattr(layer, "self_attn", None)
    parts = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm", "mlp")]
    parts += [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    rotates = hasattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb")
    return rotates and all(isinstance(part, nn.Module) for part in parts)


def _forward(
    layer: Any, original: Callable[..., Tensor], window: int | None, hidden_states: Tensor, **kwargs: Any
) -> Tensor:
    """hidden_states [1, N, width] -> [1, labelled rows, width] under a plan with labelled queries, else as ever."""
    plan = kwargs.get("plan")
    if not isinstance(plan, Plan) or plan.labelled is None:
        return original(hidden_states, **kwargs)
    index = plan.labelled
    attention = layer.self_attn
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    cos, sin = kwargs["position_embeddings"]

    normed = layer.input_layernorm(hidden_states)
    q = _heads(attention, "q", normed.index_select(1, index))  # [1, heads, labelled rows, head_dim]
    k, v = _heads(attention, "k", normed), _heads(attention, "v", normed)  # [1, kv_heads, N, head_dim]
    q = rotate(q, q, cos.index_select(1, index), sin.index_select(1, index))[0]
    k = rotate(k, k, cos, sin)[1]
    q, k, v = _one_dtype(q, k, v)
    out, _ = attend(q, k, v, plan.handle(window, labelled=True), attention.scaling)
    out = attention.o_proj(out.transpose(1, 2).flatten(2))

    hidden = hidden_states.index_select(1, index) + out
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _heads(attention: Any, name: str, x: Tensor) -> Tensor:
    x = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return (x if norm is None else norm(x)).transpose(1, 2)


@torch.no_grad()
def _agrees(layer: Any, original: Callable[..., Tensor], window: int | None, rotary: nn.Module) -> bool:
    """The labelled rows of a small random pack, through both forwards."""
    parameter = next(layer.parameters())
    if parameter.device.type == "meta":
        return False
    index = np.arange(6)
    label = np.where(index % 2 == 0, 0, -100)
    clean = Stream(index, index, index * 0, index + 1, label, index * 0.0)
    rows = assemble([(clean, None)], 1.0)
    options: dict[str, Any] = {"windows": (window,), "backend": "reference", "device": parameter.device}
    plain, skipping = Plan.from_rows(rows, **options), Plan.from_rows(rows, **options, labelled_window=window)
    generator = torch.Generator().manual_seed(0)
    width = layer.self_attn.q_proj.weight.shape[1]
    x = torch.randn((1, len(rows), width), generator=generator).to(parameter.device, parameter.dtype)
    position = torch.from_numpy(rows.position).to(parameter.device)[None]
    training = layer.training
    layer.eval()
    try:
        embeddings = rotary(x, position)
        expected = original(x, position_embeddings=embeddings, plan=plain)
        got = layer.forward(x, position_embeddings=embeddings, plan=skipping)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False  # built differently after all
    finally:
        layer.train(training)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(parameter.dtype, 3e-2)
    chosen = expected[:, torch.from_numpy(rows.labelled).to(x.device)]
    return got.shape == chosen.shape and torch.allclose(got, chosen, rtol=tolerance, atol=tolerance)


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[0].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)
