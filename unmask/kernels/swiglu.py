"""SwiGLU MLP, y = (silu(x G^T) * (x U^T)) D^T, keeping only the two projections for backward.

s = sigmoid(g), a = g s u:   dD from a (recomputed),   da = dy D,   du = da g s,   dg = da u s (1 + g (1 - s))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu_reference(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate) * up) by autograd; see swiglu_down."""
    return F.linear(F.silu(gate) * up, down)


def swiglu_down(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """gate, up [..., hidden], down [width, hidden] -> [..., width]. The product silu(gate) * up is not kept."""
    return _SwiGLUDown.apply(gate, up, down)


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, down)
        return F.silu(gate).mul_(up) @ down.to(gate.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down = ctx.saved_tensors
        dact = grad @ down.to(gate.dtype)
        silu = F.silu(gate)
        ddown = None
        if ctx.needs_input_grad[2]:
            act = (silu * up).flatten(0, -2)
            ddown = (grad.flatten(0, -2).T @ act).to(down.dtype)
        dup = silu.mul_(dact)
        dgate = torch.ops.aten.silu_backward(dact.mul_(up), gate)
        return dgate, dup, ddown
