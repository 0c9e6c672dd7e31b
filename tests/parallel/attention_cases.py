"""Attention divided over ranks against the dense definition: what every worker computes of one case."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from tests.attention.dense import softmax_attention
from unmask.attention.attend import attend
from unmask.blocks.axis import Placed
from unmask.blocks.exchange import Axis, Traffic, Widths, Wire, bytes_sent, resolve
from unmask.blocks.exchange.divided import DividedPattern
from unmask.blocks.placement import placements
from unmask.objectives import build
from unmask.rows import Document, Rows

OBJECTIVES = {
    "ar": {"name": "ar"},
    "mdlm": {"name": "mdlm", "variant": "llada"},
    "bd3lm": {"name": "block_diffusion", "block_size": 8},
    "two draws": {"name": "block_diffusion", "block_size": 8, "draws": 2},
    "causal clean": {"name": "block_diffusion", "block_size": 4, "clean": "causal"},
    "fast_dllm_v2": {"name": "fast_dllm_v2", "block_size": 8},
}
LENGTHS = {"one": [96], "packed": [50, 7, 33, 1, 21], "prompt": [96], "tiny": [5]}


@dataclass(frozen=True)
class Case:
    objective: str
    lengths: str
    placement: str
    exchange: str
    window: int | None = None
    labelled: bool = False
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (4, 2)
    node_size: int | None = None


def rows_of(case: Case) -> Rows:
    options = dict(OBJECTIVES[case.objective])
    objective = build(options.pop("name"), options).model_copy(update={"mask_token_id": 0})
    prompt = 3 / 4 if case.lengths == "prompt" else 0
    documents = [
        Document(np.arange(1, n + 1), np.arange(n) >= prompt * n, i) for i, n in enumerate(LENGTHS[case.lengths])
    ]
    return objective.rows(documents, 3, objective.levels(documents, 3)).pruned()


@cache
def axis(node_size: int | None) -> Axis:
    """Wires over all ranks; nodes of `node_size` neighbours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    traffic = Traffic()

    def wire(members: list[list[int]]) -> Wire:
        groups = [(ranks, dist.new_group(ranks)) for ranks in members for _ in range(2)]
        return Wire([group for ranks, group in groups if rank in ranks], traffic)

    whole = wire([list(range(size))])
    if node_size is None:
        return Axis(whole, traffic=traffic)
    within = wire([list(range(i, i + node_size)) for i in range(0, size, node_size)])
    between = wire([list(range(i, size, node_size)) for i in range(node_size)])
    return Axis(whole, within, between, traffic)


def run(case: Case) -> dict:
    """The largest error of this rank's out, dq, dk and dv, and its bytes: (sent, predicted) forward and backward."""
    rows, block = rows_of(case), axis(case.node_size)
    rank, ranks = block.wire.rank, block.wire.size
    placement = placements[case.placement]
    owner = placement.assign(rows, (rows.hi - rows.lo + rows.reach + 8).astype(float), ranks)
    division = Placed(case.placement, placement, rows, owner, ranks).division(case.window, case.labelled)
    wide = case.dtype.itemsize
    widths = Widths(*case.heads, 8, wide, max(4, wide), max(4, wide))
    name = resolve(case.exchange, division, widths)
    pattern = DividedPattern(division, name, block, torch.device("cpu"))

    query, held = division.query[rank], division.held[rank]
    every = np.sort(np.concatenate(division.query))
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn((1, len(rows), heads, 8), generator=generator, dtype=torch.float64).to(case.dtype).transpose(1, 2)
        for heads in (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    )
    wanted = _reference(q[:, :, every], k, v, grad[:, :, every], rows, case.window, every)
    place = np.searchsorted(every, query)
    wanted = [wanted[0][:, :, place], wanted[1][:, :, place], wanted[2][:, :, held], wanted[3][:, :, held]]

    padded_query = query if len(query) or (case.labelled or len(held)) else np.array([0])
    padded_held = held if len(held) else np.array([0])
    ours = [
        x[:, :, index].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x, index in ((q, padded_query), (k, padded_held), (v, padded_held))
    ]
    block.traffic.read()
    out, _ = attend(*ours, pattern.handle, 0.3)
    sent = [sum(block.traffic.read()[0].values())]
    got = [out.detach(), *torch.autograd.grad(out, ours, grad[:, :, padded_query])]
    sent.append(sum(block.traffic.read()[0].values()))
    count = [len(query), len(query), len(held), len(held)]
    errors = [
        float((a[:, :, :n].double() - b.double()).abs().max()) if n else 0.0
        for a, b, n in zip(got, wanted, count, strict=True)
    ]
    predicted = bytes_sent(name, division, widths, case.node_size)
    return {
        "error": max(errors),
        "sent": sent,
        "predicted": [int(part[rank]) for part in predicted],
        "exchange": name,
        "shared": len(division.shared[rank]),
        "queries": len(query),
    }


def _reference(q, k, v, grad, rows, window, query):
    q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
    mask = torch.from_numpy(rows.dense_mask(window))[query]
    out, _ = softmax_attention(q, k, v, mask, 0.3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]
