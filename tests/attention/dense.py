"""Attention by the definition, in plain torch and autograd, over a mask listed pair by pair."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.objectives import build
from unmask.rows import Document, Rows


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [1, heads, Q, head_dim], k and v [1, kv_heads, K, head_dim], mask bool [Q, K] -> out like q, lse [1, heads, Q].

    A row that attends nothing has out 0 and lse -inf.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    score = q @ k.mT * scale
    top = score.detach().masked_fill(~mask, -1e9).amax(-1, keepdim=True)
    weight = torch.where(mask, torch.exp(torch.where(mask, score - top, 0.0)), 0.0)
    total = weight.sum(-1, keepdim=True)
    out = weight @ v / torch.where(total > 0, total, 1.0)
    return out, (top + total.log()).masked_fill(total == 0, float("-inf"))[..., 0]


class Tensors(NamedTuple):
    """Leaves for one call of attend, laid out in memory as transformers lays them out."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


def random_tensors(
    queries: int,
    keys: int,
    heads: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    head_dim: int = 8,
    seed: int = 0,
) -> Tensors:
    """Normal q, k, v (requiring gradients) and an output gradient; heads: (query heads, key-value heads)."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(rows: int, n: int) -> Tensor:
        x = torch.randn((1, rows, n, head_dim), generator=generator, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2).requires_grad_()

    q, k, v = leaf(queries, heads[0]), leaf(keys, heads[1]), leaf(keys, heads[1])
    return Tensors(q, k, v, leaf(queries, heads[0]).detach())


def differentiate(out: Tensor, given: Tensors) -> list[Tensor]:
    """out and the gradients of q, k and v."""
    return [out.detach(), *torch.autograd.grad(out, given[:3], given.grad)]


def diffusion(lengths: list[int], size: int, draws: int = 1) -> Rows:
    """Block diffusion over packed documents of these lengths; the first token of each is a prompt."""
    objective = build("block_diffusion", {"block_size": size, "draws": draws}).model_copy(update={"mask_token_id": 0})
    documents = [Document(np.arange(1, n + 1), np.arange(n) > 0, i) for i, n in enumerate(lengths)]
    return objective.rows(documents, 0, objective.levels(documents, 0))
