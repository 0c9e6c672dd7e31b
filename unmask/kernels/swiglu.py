"""SwiGLU MLP, y = (silu(x G^T) * (x U^T)) D^T, keeping only the two projections for backward.

    s = sigmoid(g), a = g s u:   dD from a (recomputed),   da = dy D,   du = da g s,   dg = da u s (1 + g (1 - s))

Both passes run over chunks of rows, so that neither a nor da is ever whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.kernels.chunks import row_chunks

#: Elements of a chunk: long enough for its matrix products (measured best from 2^20 to 2^21 on CPU).
ELEMENTS = 2**20


def swiglu_down(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """gate, up [..., hidden], down [width, hidden] -> [..., width]. The product silu(gate) * up is not kept."""
    return _SwiGLUDown.apply(gate, up, down)


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, down)
        g, u = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
        matrix = down.to(gate.dtype).T
        y = g.new_empty((len(g), down.shape[0]))
        for part in row_chunks(g, ELEMENTS):
            torch.mm(F.silu(g[part]).mul_(u[part]), matrix, out=y[part])
        return y.view(*gate.shape[:-1], len(down))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down = ctx.saved_tensors
        g, u, dy = (x.reshape(-1, x.shape[-1]) for x in (gate, up, grad))
        matrix = down.to(gate.dtype)
        dgate, dup = torch.empty_like(g), torch.empty_like(u)
        wide = torch.promote_types(down.dtype, torch.float32)
        ddown = torch.zeros_like(down, dtype=wide) if ctx.needs_input_grad[2] else None
        for part in row_chunks(g, ELEMENTS):
            silu = F.silu(g[part])
            if ddown is not None:
                product = dy[part].T @ (silu * u[part])
                ddown += product
            da = dy[part] @ matrix
            torch.mul(da, silu, out=dup[part])
            torch.ops.aten.silu_backward.grad_input(da.mul_(u[part]), g[part], grad_input=dgate[part])
        return dgate.view(gate.shape), dup.view(up.shape), None if ddown is None else ddown.to(down.dtype)
