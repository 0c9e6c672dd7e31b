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


class VocabularyShard(NamedTuple):
    """Which part of a projection this rank of `group` holds: token ids from `start` on, at least one.

    Every rank but the last holds ceil(vocabulary / ranks) of the `vocabulary` token ids; sent: told the bytes that this
    rank sends.
    """

    start: int
    vocabulary: int
    group: dist.ProcessGroup
    sent: Callable[[int], None] = lambda size: None

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)


class Divided(NamedTuple):
    """Softmax over the whole vocabulary: see `unmask.kernels.linear_cross_entropy.Softmax`."""

    softcap: float | None
    exclude: int | None
    shard: VocabularyShard

    @property
    def excluded(self) -> int | None:
        """The excluded token's place in this rank's part, which may be outside of it."""
        return None if self.exclude is None else self.exclude - self.shard.start

    def chunk(self, logits: Tensor, label: Tensor, loss_weight: Tensor | None, dz: Tensor) -> Tensor:
        lse, chosen = _across(_own_sums(logits, label, self), self.shard)
        if loss_weight is not None:
            _gradient(logits, label, loss_weight, lse, self)
            if dz is not logits:
                dz.copy_(logits)
        return lse - chosen

    def summed(self, dh: Tensor) -> Tensor:
        return _summed(dh, self.shard) if len(dh) else dh


def summed_gradient(hidden: Tensor, shard: VocabularyShard) -> Tensor:
    """hidden as it is; its gradient is the sum of those of all ranks, each from its part of the vocabulary."""
    return _SummedGradient.apply(hidden, shard)


def gathered_logits(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """Logits [n, its token ids] of every rank -> [n, vocabulary], whose gradient is the same on all ranks."""
    return _Gathered.apply(logits, shard)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.shard = shard
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        return _summed(grad.to(wide, copy=True).contiguous(), ctx.shard).to(grad.dtype), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.part = slice(shard.start, shard.start + logits.shape[1])
        size = -(-shard.vocabulary // shard.ranks)
        mine = torch.nn.functional.pad(logits, (0, size - logits.shape[1])).contiguous()
        every = mine.new_empty((shard.ranks, *mine.shape))
        if len(mine):
            dist.all_gather_single(every.flatten(0, 1), mine, group=shard.group)
            shard.sent((shard.ranks - 1) * mine.nbytes)
        return every.transpose(0, 1).flatten(1)[:, : shard.vocabulary].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.part].contiguous(), None


def _summed(x: Tensor, shard: VocabularyShard) -> Tensor:
    """The sum of all ranks' x, in place."""
    dist.all_reduce(x, group=shard.group)
    shard.sent(2 * (shard.ranks - 1) * x.nbytes // shard.ranks)
    return x


def _own_sums(logits: Tensor, label: Tensor, options: Divided) -> Tensor:
    """m, s and c, [3, n], of this rank's logits [n, its token ids], which are squashed and excluded in place."""
    excluded = options.excluded
    held, index = _own(label, logits.shape[1], options.shard.start)
    found = logits.new_empty((3, len(logits)))
    top, total, chosen = found
    for rows in row_chunks(logits):
        z = logits[rows]
        if options.softcap is not None:
            z.div_(options.softcap).tanh_().mul_(options.softcap)
        if excluded is not None and 0 <= excluded < z.shape[1]:
            z[:, excluded] = float("-inf")
        # Finite, where a shard holds nothing but the excluded token.
        top[rows] = z.amax(1).clamp_min_(torch.finfo(z.dtype).min)
        total[rows] = (z - top[rows, None]).exp_().sum(1)
        chosen[rows] = torch.where(held[rows], z.gather(1, index[rows, None])[:, 0], 0.0)
    return found


def _across(mine: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """(lse, the label's logit) of the whole vocabulary, each [n]. mine: of this rank's part, [3, n]."""
    every = mine.new_empty((shard.ranks, *mine.shape))
    dist.all_gather_single(every.flatten(0, 1), mine, group=shard.group)
    shard.sent((shard.ranks - 1) * mine.nbytes)
    tops, totals, chosens = every.unbind(1)
    highest = tops.amax(0)
    return (totals * (tops - highest).exp()).sum(0).log_().add_(highest), chosens.sum(0)


def _gradient(logits: Tensor, label: Tensor, loss_weight: Tensor, lse: Tensor, options: Divided) -> None:
    """Turn squashed logits into weight * d nll / d logits (before the squash), in place."""
    held, index = _own(label, logits.shape[1], options.shard.start)
    onehot = torch.where(held, loss_weight, 0.0)
    excluded = options.excluded
    for rows in row_chunks(logits):
        z, slope = logits[rows], None
        if options.softcap is not None:
            slope = (z / options.softcap).square_().neg_().add_(1.0)
            if excluded is not None and 0 <= excluded < z.shape[1]:
                slope[:, excluded] = 0.0  # of -inf it is no number
        z.sub_(lse[rows, None]).exp_().mul_(loss_weight[rows, None])
        z.scatter_add_(1, index[rows, None], -onehot[rows, None])
        if slope is not None:
            z.mul_(slope)


def _own(label: Tensor, size: int, start: int) -> tuple[Tensor, Tensor]:
    """(which labels this rank holds, their places in its shard; 0 for others), each [n]."""
    index = label - start
    held = (index >= 0) & (index < size)
    return held, torch.where(held, index, 0)
