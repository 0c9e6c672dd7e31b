"""Each fused operation in plain torch, by autograd: what the tests of `unmask.kernels` hold them to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers writes it: statistics in fp32, the scale applied in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `unmask.kernels.rope`."""
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-x2, x1), dim=-1) * sin[:, :, None]


def swiglu(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate) * up); see `unmask.kernels.swiglu_down`."""
    return F.linear(F.silu(gate) * up, down)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    label: Tensor,
    loss_weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    exclude: int | None = None,
) -> tuple[Tensor, Tensor]:
    """From whole logits; see `unmask.kernels.linear_cross_entropy`."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if exclude is not None:
        logits = logits.index_fill(-1, torch.tensor([exclude], device=logits.device), float("-inf"))
    nll = F.cross_entropy(logits, label, reduction="none")
    return (nll * loss_weight).sum(), nll.detach()
