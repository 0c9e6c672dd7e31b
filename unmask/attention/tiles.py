"""Attention by tiles: one flash call per batch of rectangles, partial results merged by their log-sum-exp.

    w = sigmoid(l2 - l1),   out = (1 - w) out1 + w out2,   lse = log(exp l1 + exp l2)

Given the merged out and lse, the flash backward of one rectangle yields exactly that rectangle's share of the
gradients, so backward is the same loop with sums. Full rectangles run unmasked, at the kernel's own speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.attention import flash
from unmask.attention.attend import empty_rows_first, lse_dtype
from unmask.attention.plan import Pattern


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse; see attend. Partial results of half-precision inputs are merged in fp32."""
    wide = lse_dtype(q.dtype)
    out = empty_rows_first(q, dtype=wide).zero_()
    lse = q.new_full((1, q.shape[2], q.shape[1]), float("-inf"), dtype=wide).transpose(1, 2)
    for batch in pattern.batches:
        part, part_lse = flash.forward(batch.q.of(q), batch.k.of(k), batch.k.of(v), batch.bias(q.dtype), scale)
        if batch.empty is not None:
            part_lse = part_lse.masked_fill(batch.empty, float("-inf"))
        if batch.first:
            batch.q.put(out, part)
            batch.q.put(lse, part_lse)
        else:
            merged, merged_lse = merge(batch.q.of(out), batch.q.of(lse), part, part_lse)
            if batch.q.index is not None and batch.q.count > 1:
                batch.q.put(out, merged)
            batch.q.put(lse, merged_lse)
    return out if wide == q.dtype else _cast(out, q.dtype), lse


def backward(grad: Tensor, saved: tuple[Tensor, ...], pattern: Pattern, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see attend. saved: q, k, v, out, lse. Sums over tiles are kept in fp32 (fp64 for fp64)."""
    wide, narrow = lse_dtype(saved[0].dtype), saved[0].dtype
    if grad.device.type == "cpu":
        # The CPU kernel's half-precision backward is up to four times slower than its fp32 one.
        grad, saved = grad.to(wide), tuple(x.to(wide) for x in saved)
    q, k, v, out, lse = saved
    dq, dk, dv = (empty_rows_first(x, dtype=wide).zero_() for x in (q, k, v))
    for batch in pattern.batches:
        of = batch.q.of
        parts = flash.backward(
            of(grad), (of(q), batch.k.of(k), batch.k.of(v), of(out), of(lse)), batch.bias(q.dtype), scale
        )
        collect = batch.q.put if batch.first else batch.q.add
        collect(dq, parts[0])
        batch.k.add(dk, parts[1])
        batch.k.add(dv, parts[2])
    return (dq, dk, dv) if wide == narrow else (_cast(dq, narrow), _cast(dk, narrow), _cast(dv, narrow))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a partial result into `out` (in place) and return it with the new lse. Rows empty on both sides stay so."""
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    return out.lerp_(part.to(out.dtype), weight[..., None]), torch.logaddexp(lse, part_lse)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_rows_first(x, dtype=dtype).copy_(x)
