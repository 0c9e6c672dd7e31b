"""Attention of a Llama-like layer over rows: project, normalise, rotate, attend, project back.

The same modules and parameters as transformers' own forward, with the rotation fused and written in the dtype attention
wants, and with the choice of computing queries for some rows only. Used where it gives the module's own result
(`unmask.models.prove`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unmask.attention import Plan, attend
from unmask.kernels import rope


def like_llama(attention: Any) -> bool:
    """Whether the module has the parts that `attention_over_rows` uses."""
    parts = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    rotates = hasattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb")
    return rotates and hasattr(attention, "head_dim") and all(isinstance(part, nn.Module) for part in parts)


def attention_over_rows(
    attention: Any,
    normed: Tensor,
    embeddings: tuple[Tensor, Tensor],
    plan: Plan,
    window: int | None,
    query: Tensor | None = None,
) -> Tensor:
    """normed [1, N, width] -> [1, N, width], or [1, n, width] for the n rows of `query` (the plan's labelled rows).

    embeddings: cos and sin [1, N, rotary width]; keys and values are computed for all rows.
    """
    device = normed.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else normed.dtype
    cos, sin = embeddings
    k = _rotated(attention, _heads(attention, "k", normed), cos, sin, dtype)  # [1, N, kv_heads, head_dim]
    v = _heads(attention, "v", normed).to(dtype)
    if query is not None:
        normed, cos, sin = (x.index_select(1, query) for x in (normed, cos, sin))
    q = _rotated(attention, _heads(attention, "q", normed), cos, sin, dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = attend(q, k, v, plan.handle(window, labelled=query is not None), attention.scaling)
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def fused_attention(
    attention: Any, original: Callable[..., Any], window: int | None, hidden_states: Tensor, **kwargs: Any
) -> Any:
    """What `attention` computes, under a Plan by attention_over_rows, else by its original forward."""
    plan = kwargs.get("plan")
    if not isinstance(plan, Plan) or kwargs.get("cache") is not None:
        return original(hidden_states, **kwargs)
    return attention_over_rows(attention, hidden_states, kwargs["position_embeddings"], plan, window), None


def _heads(attention: Any, name: str, x: Tensor) -> Tensor:
    """[1, rows, width] -> [1, rows, heads, head_dim], normalised per head where the model does that."""
    x = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return x if norm is None else norm(x)


def _rotated(attention: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    if cos.shape[-1] == x.shape[-1]:
        return rope(x, cos, sin, dtype)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb  # rotates a part of the head
    heads = x.transpose(1, 2)
    return rotate(heads, heads[:, :1], cos, sin)[0].transpose(1, 2).to(dtype)
