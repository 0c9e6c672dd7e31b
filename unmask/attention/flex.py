"""Attention through FlexAttention, for CUDA and ROCm: one fused kernel whose mask is the four integers of a row.

    row r sees key j  <=>  lo_r <= j < hi_r  or  begin_r <= j < end_r      (its own block, up to its reach)

The block mask is built from the intervals themselves, never from a dense mask, so 131,072 rows take milliseconds.
FlexAttention has no backward on CPU, and its backward needs its own forward: it is run again there, which costs about a
quarter of the attention; `tiles` does not pay that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from unmask.attention.attend import empty_rows_first, rows_first
from unmask.attention.plan import Pattern

BLOCK = 128


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse; see attend."""
    out, aux = _flex(q.device.type)(
        *(q, k, v),
        block_mask=block_mask(pattern),
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    empty = aux.lse == float("-inf")
    return empty_rows_first(q).copy_(out.masked_fill(empty[..., None], 0.0)), rows_first(aux.lse)


def backward(grad: Tensor, saved: tuple[Tensor, ...], pattern: Pattern, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see attend. saved: q, k, v, out, lse."""
    leaves = [x.detach().requires_grad_() for x in saved[:3]]
    with torch.enable_grad():
        out = _flex(grad.device.type)(*leaves, block_mask=block_mask(pattern), scale=scale, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad)
    dq, dk, dv = (empty_rows_first(x).copy_(g) for x, g in zip(leaves, grads, strict=True))
    return dq, dk, dv


def block_mask(pattern: Pattern) -> BlockMask:
    """The pattern as FlexAttention takes it; made once a pattern."""
    if pattern.flex is None:
        pattern.flex = _block_mask(pattern)
    return pattern.flex


def _block_mask(pattern: Pattern) -> BlockMask:
    rows, device = pattern.rows, pattern.device
    lo, hi = rows.interval(pattern.window)
    begin = np.zeros(len(rows), np.int64)
    start, size = rows.blocks()
    begin[rows.clean :] = np.repeat(start, size)
    bounds = [lo, hi, begin, begin + rows.reach]
    if pattern.query is not None:
        bounds = [bound[pattern.query] for bound in bounds]
    partial, full = _classify(bounds, len(rows))
    lo_t, hi_t, begin_t, end_t = (torch.from_numpy(bound).to(device) for bound in bounds)

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        context = (key >= lo_t[row]) & (key < hi_t[row])
        own = (key >= begin_t[row]) & (key < end_t[row])
        return context | own

    return BlockMask.from_kv_blocks(
        *(*_indices(partial, device), *_indices(full, device)),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(pattern.queries, len(rows)),
    )


def _classify(bounds: list[np.ndarray], keys: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [query blocks, key blocks] twice: partly attended, and attended by every row of the block."""
    lo, hi, begin, end = bounds
    block = np.arange(len(lo)) // BLOCK
    shape = (int(block[-1]) + 1, -(-keys // BLOCK))
    touched = _cover(shape, block, lo // BLOCK, -(-hi // BLOCK), lo < hi)
    touched += _cover(shape, block, begin // BLOCK, -(-end // BLOCK), begin < end)
    whole = _cover(shape, block, -(-lo // BLOCK), hi // BLOCK, lo < hi)
    full = whole == np.bincount(block)[:, None]
    return (touched > 0) & ~full, full


def _cover(
    shape: tuple[int, int], block: np.ndarray, first: np.ndarray, last: np.ndarray, real: np.ndarray
) -> np.ndarray:
    """How many rows of each query block cover each key block, when row r covers key blocks [first, last)."""
    change = np.zeros((shape[0], shape[1] + 1), np.int64)
    real = real & (first < last)
    np.add.at(change, (block[real], first[real]), 1)
    np.add.at(change, (block[real], last[real]), -1)
    return np.cumsum(change, axis=1)[:, :-1]


def _indices(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, query blocks] and, chosen ones first, key block numbers [1, 1, query blocks, key blocks], int32."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    count = chosen.sum(1).astype(np.int32)
    return torch.from_numpy(count).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


@cache
def _flex(device: str) -> Any:
    """The compiled kernel on GPUs; on CPU the eager form, which has a forward only (for tests)."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)
