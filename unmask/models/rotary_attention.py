"""Attention of a Llama-like layer over rows: project, normalise, rotate, attend, project back.

The same modules and parameters as transformers' own forward, with the rotation fused and written in the dtype attention
wants, and with the choice of computing queries for some rows only. Used where it gave the module's own result.
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
from unmask.kernels import rope
from unmask.rows import Stream, assemble

#: What a module that is built differently after all may raise while it is tried.
BUILT_DIFFERENTLY = (TypeError, AttributeError, RuntimeError, ValueError)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


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


def fuse_attention(attention: Any, window: int | None, rotary: nn.Module) -> bool:
    """Let `attention` go through attention_over_rows under a Plan; False when that is not proven for it."""
    if not like_llama(attention):
        return False
    return replaced_if_proven(attention, _forward, _agrees, window, rotary)


def replaced_if_proven(
    module: Any, forward: Callable[..., Any], agrees: Callable[..., bool], window: int | None, rotary: nn.Module
) -> bool:
    """Let `module` run forward(module, its own forward, window, ...); undone unless agrees(module, its own, ...)."""
    original = module.forward
    module.forward = partial(forward, module, original, window)
    proven = next(module.parameters()).device.type != "meta" and agrees(module, original, window, rotary)
    if not proven:
        module.forward = original
    return proven


def trial_rows() -> Any:
    """A small causal pack whose even rows are labelled, for proving a replacement."""
    index = np.arange(6)
    label = np.where(index % 2 == 0, 0, -100)
    return assemble([(Stream(index, index, index * 0, index + 1, label, index * 0.0), None)], 1.0)


def trial_input(module: nn.Module, width: int, rotary: nn.Module) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Random hidden states for trial_rows, and their position embeddings."""
    parameter = next(module.parameters())
    x = torch.randn((1, 6, width), generator=torch.Generator().manual_seed(0)).to(parameter.device, parameter.dtype)
    return x, rotary(x, torch.arange(6, device=parameter.device)[None])


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal up to the rounding of the dtype."""
    tolerance = TOLERANCE.get(expected.dtype, 3e-2)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


def _forward(
    attention: Any, original: Callable[..., Any], window: int | None, hidden_states: Tensor, **kwargs: Any
) -> Any:
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


@torch.no_grad()
def _agrees(attention: Any, original: Callable[..., Any], window: int | None, rotary: nn.Module) -> bool:
    device = next(attention.parameters()).device
    plan = Plan.from_rows(trial_rows(), (window,), backend="reference", device=device)
    try:
        x, embeddings = trial_input(attention, attention.q_proj.weight.shape[1], rotary)
        arguments: dict[str, Any] = {"position_embeddings": embeddings, "attention_mask": None, "plan": plan}
        return close(attention.forward(x, **arguments)[0], original(x, **arguments)[0])
    except BUILT_DIFFERENTLY:
        return False
