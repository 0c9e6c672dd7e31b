"""Linear cross-entropy: the head and its loss in chunks, so that no [rows, vocabulary] matrix is ever whole.

    z = softcap(h W^T + b),   nll_i = logsumexp(z_i) - z_i[label_i],   loss = sum_i weight_i nll_i
    dz = weight_i (softmax(z_i) - onehot(label_i)),   dh = dz W,   dW = dz^T h

The weights are known before the forward, so each chunk's gradients are formed while its logits are at hand: dh goes to
one buffer, dW to another, and backward only scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.kernels.chunks import row_chunks

#: Rows of a chunk: long enough for the matrix products, short enough to keep logits small.
CHUNK = 1024


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
    """Weighted sum of cross-entropies and the single ones.

    hidden [n, width], weight [vocabulary, width], label int64 [n], loss_weight [n], bias [vocabulary]; `softcap`
    squashes the logits, `exclude` is a token id whose logit is taken as -inf. Returns (sum, nll fp32 [n]), of which
    nll carries no gradient.
    Matrix products run in autocast's dtype where it is on, sums in fp32 (fp64 for fp64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    return _LinearCrossEntropy.apply(hidden, weight, bias, label, loss_weight, (softcap, exclude, grad))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, label: Tensor, loss_weight: Tensor, options
    ):
        softcap, exclude, grad = options
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        matrix, loss_weight = weight.to(hidden.dtype), loss_weight.to(wide)
        nll = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        dh = torch.empty_like(hidden, dtype=wide) if grad and ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if grad and ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias, dtype=wide) if grad and bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            logits = _logits(hidden[part], matrix, bias, wide)
            dz = logits if wide == hidden.dtype else torch.empty_like(logits, dtype=hidden.dtype)
            for rows in row_chunks(logits):
                at = slice(start + rows.start, start + rows.stop)
                nll[at] = _softmax_gradient(logits[rows], label[at, None], loss_weight[at, None], softcap, exclude)
                if dz is not logits:
                    dz[rows] = logits[rows]
            if not grad:
                continue
            if db is not None:
                db += logits.sum(0)
            if dh is not None:
                dh[part] = dz @ matrix
            if dw is not None:
                _accumulate(dw, dz, hidden[part])
        ctx.save_for_backward(dh, dw, db)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * loss_weight).sum(), nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        dh, dw, db = ctx.saved_tensors
        hidden, weight = ctx.dtypes
        return (
            None if dh is None else (dh * grad).to(hidden),
            None if dw is None else (dw * grad).to(weight),
            None if db is None else db * grad,
            None,
            None,
            None,
        )


def _softmax_gradient(
    logits: Tensor, target: Tensor, loss_weight: Tensor, softcap: float | None, exclude: int | None
) -> Tensor:
    """Turn logits [n, vocabulary] into weight * d nll / d logits in place; returns nll [n]. target, weight: [n, 1]."""
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits * logits
        logits.mul_(softcap)
    if exclude is not None:
        logits[:, exclude] = float("-inf")
    chosen, top = logits.gather(1, target), logits.amax(1, keepdim=True)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    logits.mul_(loss_weight / total).scatter_add_(1, target, -loss_weight)
    if slope is not None:
        logits.mul_(slope)
    return (total.log_() + top - chosen)[:, 0]


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    logits = (hidden @ matrix.T).to(wide)
    return logits if bias is None else logits.add_(bias)


def _accumulate(dw: Tensor, dz: Tensor, hidden: Tensor) -> None:
    if dw.dtype == dz.dtype:
        dw.addmm_(dz.T, hidden)
    else:
        dw += dz.T @ hidden
