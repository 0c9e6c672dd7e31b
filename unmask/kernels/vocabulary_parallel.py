"""Linear cross-entropy over a vocabulary that is divided among the ranks of a group (Megatron-LM, arXiv 1909.08053).

Rank r holds the rows W_r of the projection and forms z_r = softcap(h W_r^T + b_r) of a chunk of rows. Of each row three
numbers cross the network, in one all-gather a chunk:

    m_r = max z_r,   s_r = sum exp(z_r - m_r),   c_r = z_r[label] on the rank that holds the label, else 0
    lse = log sum_r s_r exp(m_r),   nll = lse - sum_r c_r,   dz_r = weight (exp(z_r - lse) - onehot(label))

dW_r = dz_r^T h stays where W_r is; dh = sum_r dz_r W_r is summed over the group once, when all chunks are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unmask.kernels.chunks import row_chunks
from unmask.kernels.linear_cross_entropy import CHUNK, _accumulate, _LinearCrossEntropy, _logits


class VocabularyShard(NamedTuple):
    """The part of a projection that this rank of `group` holds: token ids from `start` on.

    weight [its token ids, width], at least one; bias [its token ids]; sent: told the bytes that this rank sends.
    """

    weight: Tensor
    bias: Tensor | None
    start: int
    group: dist.ProcessGroup
    sent: Callable[[int], None] = lambda size: None


class _Options(NamedTuple):
    softcap: float | None
    exclude: int | None
    grad: bool
    start: int
    group: dist.ProcessGroup
    sent: Callable[[int], None]


def vocabulary_parallel_cross_entropy(
    hidden: Tensor,
    shard: VocabularyShard,
    label: Tensor,
    loss_weight: Tensor,
    *,
    softcap: float | None = None,
    exclude: int | None = None,
) -> tuple[Tensor, Tensor]:
    """linear_cross_entropy of the whole vocabulary, of which this rank holds `shard`.

    All ranks of the group call it with the same hidden [n, width], label int64 [n] (ids of the whole vocabulary),
    loss_weight [n] and `exclude`. All get the same (sum, nll fp32 [n]) and the same gradient of hidden, and each that
    of its own shard. The loss stands for one loss on all ranks: backward starts from the same gradient on each.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    inputs = (hidden, shard.weight, shard.bias)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    options = _Options(softcap, exclude, grad, *shard[2:])
    return _VocabularyParallel.apply(*inputs, label, loss_weight, options)


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        label: Tensor,
        loss_weight: Tensor,
        options: _Options,
    ):
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        matrix, loss_weight = weight.to(hidden.dtype), loss_weight.to(wide)
        nll = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        wanted = [options.grad and needed for needed in ctx.needs_input_grad[:3]]
        dh = torch.empty_like(hidden, dtype=wide) if wanted[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        db = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            logits = _logits(hidden[part], matrix, bias, wide)
            lse, chosen = _across(_own_sums(logits, label[part], options), options)
            nll[part] = lse - chosen
            if not options.grad:
                continue
            _gradient(logits, label[part], loss_weight[part], lse, options)
            dz = logits.to(hidden.dtype)
            if db is not None:
                db += logits.sum(0)
            if dh is not None:
                dh[part] = dz @ matrix
            if dw is not None:
                _accumulate(dw, dz, hidden[part])
        if dh is not None and len(dh):
            dist.all_reduce(dh, group=options.group)
            ranks = dist.get_world_size(options.group)
            options.sent(2 * (ranks - 1) * dh.nbytes // ranks)
        ctx.save_for_backward(dh, dw, db)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * loss_weight).sum(), nll

    backward = _LinearCrossEntropy.backward


def _own_sums(logits: Tensor, label: Tensor, options: _Options) -> Tensor:
    """m, s and c, [3, n], of this rank's logits [n, its token ids], which are squashed and excluded in place."""
    own = None if options.exclude is None else options.exclude - options.start
    held, index = _own(label, logits.shape[1], options.start)
    found = logits.new_empty((3, len(logits)))
    top, total, chosen = found
    for rows in row_chunks(logits):
        z = logits[rows]
        if options.softcap is not None:
            z.div_(options.softcap).tanh_().mul_(options.softcap)
        if own is not None and 0 <= own < z.shape[1]:
            z[:, own] = float("-inf")
        # Finite, where a shard holds nothing but the excluded token.
        top[rows] = z.amax(1).clamp_min_(torch.finfo(z.dtype).min)
        total[rows] = (z - top[rows, None]).exp_().sum(1)
        chosen[rows] = torch.where(held[rows], z.gather(1, index[rows, None])[:, 0], 0.0)
    return found


def _across(mine: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """(lse, the label's logit) of the whole vocabulary, each [n]. mine: of this rank's part, [3, n]."""
    ranks = dist.get_world_size(options.group)
    every = mine.new_empty((ranks, *mine.shape))
    dist.all_gather_single(every.flatten(0, 1), mine, group=options.group)
    options.sent((ranks - 1) * mine.nbytes)
    tops, totals, chosens = every.unbind(1)
    highest = tops.amax(0)
    return (totals * (tops - highest).exp()).sum(0).log_().add_(highest), chosens.sum(0)


def _gradient(logits: Tensor, label: Tensor, loss_weight: Tensor, lse: Tensor, options: _Options) -> None:
    """Turn squashed logits into weight * d nll / d logits (before the squash), in place."""
    held, index = _own(label, logits.shape[1], options.start)
    onehot = torch.where(held, loss_weight, 0.0)
    own = None if options.exclude is None else options.exclude - options.start
    for rows in row_chunks(logits):
        z, slope = logits[rows], None
        if options.softcap is not None:
            slope = (z / options.softcap).square_().neg_().add_(1.0)
            if own is not None and 0 <= own < z.shape[1]:
                slope[:, own] = 0.0  # of -inf it is no number
        z.sub_(lse[rows, None]).exp_().mul_(loss_weight[rows, None])
        z.scatter_add_(1, index[rows, None], -onehot[rows, None])
        if slope is not None:
            z.mul_(slope)


def _own(label: Tensor, size: int, start: int) -> tuple[Tensor, Tensor]:
    """(which labels this rank holds, their places in its shard; 0 for others), each [n]."""
    index = label - start
    held = (index >= 0) & (index < size)
    return held, torch.where(held, index, 0)
