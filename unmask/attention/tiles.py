"""Attention by tiles: one flash call per batch of rectangles, partial results merged by their log-sum-exp.

    w = sigmoid(l2 - l1),   out = (1 - w) out1 + w out2,   lse = log(exp l1 + exp l2)

Given the merged out and lse, the flash backward of one rectangle yields exactly that rectangle's share of the
gradients, so backward is the same loop with sums. Full rectangles run unmasked, at the kernel's own speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.attention import flash
from unmask.attention.attend import empty_rows_first, lse_dtype
from unmask.attention.plan import Pattern, TileBatch


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse; see attend."""
    partial = Partial(q, scale)
    partial.add(k, v, pattern.batches)
    return partial.result()


def backward(grad: Tensor, saved: tuple[Tensor, ...], pattern: Pattern, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see attend. saved: q, k, v, out, lse."""
    q, k, v, out, lse = saved
    gradients = Gradients(grad, (q, out, lse), scale)
    dk, dv = gradients.add(k, v, pattern.batches)
    return narrowed(gradients.dq, q.dtype), narrowed(dk, k.dtype), narrowed(dv, v.dtype)


class Partial:
    """The attention of some queries over the keys seen so far. Half-precision inputs are merged in fp32."""

    def __init__(self, q: Tensor, scale: float):
        self.q, self.scale = q, scale
        wide = lse_dtype(q.dtype)
        self.out = empty_rows_first(q, dtype=wide).zero_()
        self.lse = q.new_full((1, q.shape[2], q.shape[1]), float("-inf"), dtype=wide).transpose(1, 2)

    def add(self, k: Tensor, v: Tensor, batches: Sequence[TileBatch]) -> None:
        """Fold in the rectangles of `batches`, whose keys count in k and v."""
        q, out, lse = self.q, self.out, self.lse
        for batch in batches:
            of = batch.q.of
            part, part_lse = flash.forward(of(q), batch.k.of(k), batch.k.of(v), batch.bias(q.dtype), self.scale)
            if batch.empty is not None:
                part_lse = part_lse.masked_fill(batch.empty, float("-inf"))
            if batch.first:
                batch.q.put(out, part)
                batch.q.put(lse, part_lse)
            else:
                merged, merged_lse = merge(of(out), of(lse), part, part_lse)
                if batch.q.index is not None and batch.q.count > 1:
                    batch.q.put(out, merged)
                batch.q.put(lse, merged_lse)

    def merge(self, part: Tensor, part_lse: Tensor) -> None:
        """Fold in a result over other keys, computed elsewhere."""
        self.out, self.lse = merge(self.out, self.lse, part, part_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of the queries, and lse."""
        return narrowed(self.out, self.q.dtype), self.lse


class Gradients:
    """dq of some queries, and shares of dk and dv, given the *merged* out and lse. Sums are kept in fp32 (fp64)."""

    def __init__(self, grad: Tensor, saved: tuple[Tensor, ...], scale: float):
        """saved: q, out, lse."""
        self.scale, self.wide = scale, lse_dtype(grad.dtype)
        self.grad, self.q, self.out, self.lse = (self._ready(x) for x in (grad, *saved))
        self.dq = empty_rows_first(self.q, dtype=self.wide).zero_()

    def _ready(self, x: Tensor) -> Tensor:
        # The CPU kernel's half-precision backward is up to four times slower than its fp32 one.
        return x.to(self.wide) if x.device.type == "cpu" else x

    def zeros(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Sums for dk and dv, still zero."""
        return empty_rows_first(k, dtype=self.wide).zero_(), empty_rows_first(v, dtype=self.wide).zero_()

    def add(
        self, k: Tensor, v: Tensor, batches: Sequence[TileBatch], sums: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """dk and dv over the rectangles of `batches`, whose keys count in k and v, added to `sums`; dq grows."""
        dk, dv = sums or self.zeros(k, v)
        k, v = self._ready(k), self._ready(v)
        for batch in batches:
            of = batch.q.of
            saved = of(self.q), batch.k.of(k), batch.k.of(v), of(self.out), of(self.lse)
            parts = flash.backward(of(self.grad), saved, batch.bias(self.q.dtype), self.scale)
            batch.q.add(self.dq, parts[0])
            batch.k.add(dk, parts[1])
            batch.k.add(dv, parts[2])
        return dk, dv


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a partial result into `out` (in place) and return it with the new lse. Rows empty on both sides stay so."""
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    return out.lerp_(part.to(out.dtype), weight[..., None]), torch.logaddexp(lse, part_lse)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype of the model's tensors, rows first in memory."""
    return x if x.dtype == dtype else empty_rows_first(x, dtype=dtype).copy_(x)
