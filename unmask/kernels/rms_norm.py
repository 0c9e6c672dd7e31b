"""RMSNorm, y = w * x / sqrt(mean(x^2) + eps), saving x and one number a row instead of transformers' fp32 copies.

with r = 1 / sqrt(mean(x^2) + eps), g = w * dy:   dx = r g - x r^3 mean(g x),   dw = sum over rows of dy * x r
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers writes it: statistics in fp32, the scale applied in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width]; statistics in fp32 (fp64 for fp64), result in the promoted dtype of both."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        if wide.dtype == x.dtype == weight.dtype:
            return (x * scale).mul_(weight)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        dw = dx = None
        if ctx.needs_input_grad[1]:
            width = x.shape[-1]
            dw = torch.mul(grad, normed).reshape(-1, width).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            inner = torch.mul(grad, weight).to(scale.dtype)
            mean = torch.linalg.vecdot(inner, normed).unsqueeze_(-1).div_(x.shape[-1])
            dx = inner.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype)
        return dx, dw, None
