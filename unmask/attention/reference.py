"""Dense attention by the formula, in any dtype: what the other backends are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.attention.attend import rows_first
from unmask.attention.plan import Pattern


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse; see attend."""
    score = _score(q, k, pattern, scale)  # [kv_heads, group, Q, K]
    lse = torch.logsumexp(score, -1)
    probability = torch.exp(score - _finite(lse)[..., None])
    out = torch.einsum("hgqk,hkd->qhgd", probability.to(v.dtype), v[0])
    out = out.reshape(1, q.shape[2], q.shape[1], q.shape[3])
    return out.contiguous().transpose(1, 2), rows_first(lse.reshape(1, q.shape[1], q.shape[2]))


def backward(grad: Tensor, saved: tuple[Tensor, ...], pattern: Pattern, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see attend. saved: q, k, v, out, lse."""
    q, k, v, out, lse = saved
    kv = k.shape[1]
    query, grad_out, merged = (x[0].unflatten(0, (kv, -1)) for x in (q, grad, out))
    probability = torch.exp(_score(q, k, pattern, scale) - lse[0].unflatten(0, (kv, -1))[..., None])
    delta = (grad_out * merged).sum(-1, keepdim=True)
    dscore = probability * (torch.einsum("hgqd,hkd->hgqk", grad_out, v[0]) - delta) * scale
    dscore, probability = dscore.to(q.dtype), probability.to(q.dtype)
    dq = torch.einsum("hgqk,hkd->qhgd", dscore, k[0]).reshape(1, q.shape[2], q.shape[1], q.shape[3])
    dk = torch.einsum("hgqk,hgqd->khd", dscore, query)[None]
    dv = torch.einsum("hgqk,hgqd->khd", probability, grad_out)[None]
    dq, dk, dv = (x.contiguous().transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv


def _score(q: Tensor, k: Tensor, pattern: Pattern, scale: float) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    query = q[0].unflatten(0, (k.shape[1], -1)).to(wide)
    score = torch.einsum("hgqd,hkd->hgqk", query, k[0].to(wide)) * scale
    return score.masked_fill(~pattern.mask, float("-inf"))


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)
