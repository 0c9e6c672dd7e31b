"""Soft embeddings: what a distribution over tokens looks like to a model that embeds tokens (self-conditioning).

    z = softcap(h W^T),   p = softmax(z),   s = p E            dE = p^T ds, and no gradient to h or W through p

h are the hidden states of a pass without gradient (Chen et al. 2208.04202; DiffusionGemma), so p is a constant, but the
embedding is not. In chunks of rows, so that no [rows, vocabulary] matrix is ever whole; backward forms p again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

#: Rows of a chunk.
CHUNK = 256


def soft_embedding(
    hidden: Tensor, head: Tensor, embedding: Tensor, softcap: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """hidden [n, width], head and embedding [vocabulary, width] (they may be one) -> [n, width]; `softcap` squashes the
    logits. The gradient goes to the embedding alone. The softmax is fp32's (fp64 for fp64).

    group: whose ranks have a part of the vocabulary each, and the same rows; the result is then this rank's summand.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return _SoftEmbedding.apply(hidden.detach(), head.detach(), embedding, softcap, group)


class _SoftEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, embedding: Tensor, softcap: float | None, group: ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, head, embedding)
        ctx.softcap, ctx.group = softcap, group
        out = embedding.new_empty((len(hidden), embedding.shape[1]))
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            out[part] = _probability(hidden[part], head, softcap, group).to(embedding.dtype) @ embedding
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, embedding = ctx.saved_tensors
        total = torch.zeros_like(embedding, dtype=torch.promote_types(embedding.dtype, torch.float32))
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            probability = _probability(hidden[part], head, ctx.softcap, ctx.group)
            total.addmm_(probability.T, grad[part].to(probability.dtype))
        return None, None, total.to(embedding.dtype), None, None


def _probability(hidden: Tensor, head: Tensor, softcap: float | None, group: ProcessGroup | None = None) -> Tensor:
    """softmax of the logits, [rows, vocabulary]; of a part of the vocabulary, over all of it."""
    logits = torch.nn.functional.linear(hidden, head.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if group is None:
        return logits.softmax(-1)
    largest = logits.amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits = logits.sub_(largest).exp_()
    total = logits.sum(-1, keepdim=True)
    dist.all_reduce(total, group=group)
    return logits.div_(total)
