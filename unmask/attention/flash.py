"""One rectangle (or a batch of them) through torch's own flash kernels, with the log-sum-exp they compute anyway.

CPU: the flash kernel takes additive masks, any float dtype and grouped heads. CUDA and ROCm: flash for unmasked half
precision, memory-efficient attention for masks and fp32 (it has no grouped heads: K and V are expanded).
Shapes: q [n, heads, rows, head_dim], k and v [n, kv_heads, keys, head_dim], bias [rows, keys] or None, lse
[n, heads, rows].
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of softmax(scale q k^T + bias) v."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    if _flash_fits(q, bias):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[:2]
    k, v = _expanded(q, k, v)
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, False, scale=scale
    )
    return out, lse.narrow(2, 0, q.shape[2])  # the kernel pads its lse to a multiple of 32 rows


def backward(
    grad: Tensor, saved: tuple[Tensor, ...], bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The rectangle's share of dq, dk and dv. saved: q, k, v and the *merged* out and lse of its rows."""
    q, k, v, out, lse = saved
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
        )
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the dropout state, unused without dropout
    if _flash_fits(q, bias):
        empty = torch.empty(0, dtype=torch.int32, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse.contiguous(), empty, empty, q.shape[2], k.shape[2], 0.0, False, none, none),
            scale=scale,
        )
    groups = q.shape[1] // k.shape[1]
    k, v = _expanded(q, k, v)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(grad, q, k, v, _aligned(bias, q, k), out, padded, none, none, 0.0, [True, True, True, False], False),
        scale=scale,
    )
    return dq, dk.unflatten(1, (-1, groups)).sum(2), dv.unflatten(1, (-1, groups)).sum(2)


def _flash_fits(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias as the memory-efficient kernel wants it: [n, heads, rows, keys], its rows 16 elements aligned."""
    if bias is None:
        return None
    rows, keys = bias.shape
    storage = torch.nn.functional.pad(bias, (0, -keys % 16))
    return storage.narrow(1, 0, keys).expand(q.shape[0], q.shape[1], rows, keys)
