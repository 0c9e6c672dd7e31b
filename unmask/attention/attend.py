"""attend: softmax(scale * q k^T + mask) v over Rows, with its log-sum-exp, as one operator.

A custom operator (and a second one for its backward) rather than an autograd.Function: torch.compile sees one opaque
node, and selective activation checkpointing can keep its result. It saves q, k, v, out and lse, nothing quadratic:

    out_r = sum_j p_rj v_j,   p_rj = exp(scale q_r k_j - lse_r) over the keys j that row r attends
    dv_j = sum_r p_rj do_r,   ds_rj = p_rj (do_r v_j - do_r out_r),   dq_r = scale sum_j ds_rj k_j,   dk_j likewise

A row that attends nothing has out = 0 and lse = -inf, and gives and receives no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from unmask.attention.plan import Pattern, lookup

BACKENDS = {
    "reference": "unmask.attention.reference",
    "tiles": "unmask.attention.tiles",
    "flex": "unmask.attention.flex",
    "divided": "unmask.blocks.exchange.divided",
}


def backend_of(pattern: Pattern) -> ModuleType:
    """The module that computes a pattern: it has forward(...) and backward(...)."""
    return import_module(BACKENDS[pattern.backend])


@torch.library.custom_op("unmask::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one pack.

    q [1, heads, Q, head_dim], k and v [1, kv_heads, K, head_dim] (heads a multiple of kv_heads), handle: 0-d int64 from
    Plan.handle. Returns out [1, heads, Q, head_dim], laid out as [1, Q, heads, head_dim], and lse fp32 (fp64 for fp64)
    [1, heads, Q], rows first in memory too, which carries no gradient.
    """
    pattern = lookup(handle)
    if q.shape[2] != pattern.queries or k.shape[2] != pattern.keys:
        raise RuntimeError(
            f"attend: {q.shape[2]} queries and {k.shape[2]} keys do not fit a plan of {pattern.queries} queries "
            f"and {pattern.keys} keys"
        )
    return backend_of(pattern).forward(q, k, v, pattern, scale)


@torch.library.custom_op("unmask::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, saved: Sequence[Tensor], handle: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, laid out like out: [1, rows, heads, head_dim] in memory. saved: q, k, v, out, lse."""
    pattern = lookup(handle)
    q, k, v, out, lse = saved
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return backend_of(pattern).backward(grad, (q, k, v, out, lse), pattern, scale)


def empty_rows_first(like: Tensor, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised [1, heads, rows, head_dim] in transformers' memory layout [1, rows, heads, head_dim]."""
    _, heads, n, width = like.shape
    return like.new_empty((1, n if rows is None else rows, heads, width), dtype=dtype).transpose(1, 2)


def rows_first(x: Tensor) -> Tensor:
    """x [1, heads, rows, ...] unchanged in value, with rows first in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((1, q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))
    return empty_rows_first(q), lse.transpose(1, 2)


@attend_backward.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], handle: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[:3]
    return empty_rows_first(q), empty_rows_first(k), empty_rows_first(v)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, handle, scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, handle)
    ctx.scale = scale
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    *saved, handle = ctx.saved_tensors
    return *attend_backward(grad, saved, handle, ctx.scale), None, None


attend.register_autograd(_backward, setup_context=_setup_context)
