"""Rotary position embedding in two passes over memory instead of transformers' five.

y = x * cos + rotate_half(x) * sin:   y1 = x1 cos1 - x2 sin1,   y2 = x2 cos2 + x1 sin2   (1, 2: the halves)
dx1 = dy1 cos1 + dy2 sin2,   dx2 = dy2 cos2 - dy1 sin1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.kernels.chunks import row_chunks


def rope(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [1, rows, heads, head_dim], cos and sin [1, rows, head_dim]; the result in `dtype` (default: x's)."""
    return _Rope.apply(x, cos, sin, x.dtype if dtype is None else dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x, cos, sin, dtype, backward=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.dtype, backward=True), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
    """Rotate by the angles, or for the gradient by their negatives with each half's sine taken from the other."""
    half = x.shape[-1] // 2
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if backward:
        sin = torch.cat((-sin[..., half:], -sin[..., :half]), dim=-1)
    for part in row_chunks(x[0].flatten(1)):
        xs, c, s = x[0, part], cos[0, part, None], sin[0, part, None]
        ys = xs * c
        ys[..., :half].addcmul_(xs[..., half:], s[..., :half], value=-1.0)
        ys[..., half:].addcmul_(xs[..., :half], s[..., half:])
        y[0, part] = ys
    return y
