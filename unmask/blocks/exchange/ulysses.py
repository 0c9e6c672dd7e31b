"""ulysses: the heads are divided instead of the rows, for the time of one attention.

Every rank sends each other rank its rows of that rank's heads, attends with its own heads over all rows, and gets its
rows of the other heads back. Key heads that fewer than one per rank can have are sent to all ranks that share them.
Over a two-level network (`ulysses+ring` and the like) the heads are divided within a node of U ranks, and what a node's
ranks hold together is exchanged with the other nodes, head by head, by the second exchange.
Bytes summed over ranks, N rows, one level: N (2 D_q + 2 D_kv) s (P-1)/P forward, and the log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.attention.attend import lse_dtype
from unmask.attention.tiles import Gradients, Partial, narrowed
from unmask.blocks.exchange.chunks import Pair, flat, heads_first, tiles_over
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.query import stand_in
from unmask.blocks.exchange.wire import Wire


class AllRows:
    """The inner attention of one level: all rows are here, nothing is exchanged."""

    def __init__(self, division: Division, device: torch.device):
        self.tiles = tiles_over(division, division.query[0], division.held[0], device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Pair:
        partial = Partial(q, scale)
        partial.add(k, v, self.tiles)
        return partial.result()

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        gradients = Gradients(grad, (q, out, lse), scale)
        dk, dv = gradients.add(k, v, self.tiles)
        return gradients.dq, dk, dv


class Heads:
    """Which query and key heads each of `size` ranks takes: slices."""

    def __init__(self, heads: int, kv_heads: int, size: int):
        each, group = heads // size, heads // kv_heads
        self.query = [slice(u * each, (u + 1) * each) for u in range(size)]
        self.key = [slice(u * each // group, ((u + 1) * each - 1) // group + 1) for u in range(size)]


class Ulysses:
    """Attention of one kind over a divided pack; `inner` attends over what this rank's node holds together."""

    def __init__(self, division: Division, wire: Wire, inner: Any, device: torch.device, node: int):
        self.wire, self.inner = wire, inner
        first = node * wire.size
        of = range(first, first + wire.size)
        self.rows = _Sorted([division.held[rank] for rank in of], device)
        self.queries = _Sorted([division.query[rank] for rank in of], device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Pair:
        """out and lse of the local queries."""
        heads = Heads(q.shape[1], k.shape[1], self.wire.size)
        k, v = self._to_heads((k, v), heads.key, self.rows, "keys and values")
        (q_heads,) = self._to_heads((q,), heads.query, self.queries, "queries")
        out, lse = self.inner.forward(q_heads, k, v, scale)
        out, lse = self._to_rows((out, lse), heads.query, self.queries, "partial results", q.shape[1], q.shape[2])
        return out, lse

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of the local rows. saved: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        heads = Heads(q.shape[1], k.shape[1], self.wire.size)
        wide = lse_dtype(q.dtype)
        delta = (grad.to(wide) * out.to(wide)).sum(-1)
        k_heads, v_heads = self._to_heads((k, v), heads.key, self.rows, "keys and values")
        queries = self._to_heads((q, grad, lse, delta), heads.query, self.queries, "queries")
        q_heads, grad_heads, lse_heads, delta_heads = queries
        result = stand_in(grad_heads, delta_heads)
        dq, dk, dv = self.inner.backward(grad_heads, (q_heads, k_heads, v_heads, result, lse_heads), scale)
        (dq,) = self._to_rows((dq.to(wide),), heads.query, self.queries, "gradients", q.shape[1], q.shape[2])
        dk, dv = self._to_rows((dk.to(wide), dv.to(wide)), heads.key, self.rows, "gradients", k.shape[1], k.shape[2])
        return narrowed(dq, q.dtype), narrowed(dk, k.dtype), narrowed(dv, v.dtype)

    def _to_heads(self, tensors: tuple[Tensor, ...], heads: list[slice], rows: _Sorted, kind: str) -> list[Tensor]:
        """Each of [1, heads, local rows, ...] -> [1, this rank's heads, the node's rows in order, ...]."""
        rank, size = self.wire.rank, self.wire.size
        here = heads[rank]
        local = rows.counts[rank]
        mine = [x[0, :, :local].transpose(0, 1) for x in tensors]  # [rows, heads, ...]
        parts = [[x.new_empty((n, here.stop - here.start, *x.shape[2:])) for n in rows.counts] for x in mine]
        rounds = []
        for shift in range(1, size):
            to, source = (rank + shift) % size, (rank - shift) % size
            sends = [(to, x[:, heads[to]].contiguous()) for x in mine]
            rounds.append(self.wire.post(kind, sends, [(source, part[source]) for part in parts]))
        for x, part in zip(mine, parts, strict=True):
            part[rank].copy_(x[:, here])
        for posted in rounds:
            posted.wait()
        return [heads_first(rows.sorted(torch.cat(part))) for part in parts]

    def _to_rows(
        self, tensors: tuple[Tensor, ...], heads: list[slice], rows: _Sorted, kind: str, total: int, local: int
    ) -> list[Tensor]:
        """The way back, [1, all heads, local rows, ...]; heads that several ranks have add up."""
        rank, size = self.wire.rank, self.wire.size
        parts = [rows.parted(flat(x)) for x in tensors]
        rounds, received = [], []
        for shift in range(1, size):
            to, source = (rank + shift) % size, (rank - shift) % size
            width = heads[source].stop - heads[source].start
            theirs = [part[rank].new_empty((rows.counts[rank], width, *part[rank].shape[2:])) for part in parts]
            rounds.append(self.wire.post(kind, [(to, part[to]) for part in parts], [(source, x) for x in theirs]))
            received.append((source, theirs))
        whole = [part[rank].new_zeros((local, total, *part[rank].shape[2:])) for part in parts]
        count = rows.counts[rank]
        for x, part in zip(whole, parts, strict=True):
            x[:count, heads[rank]] = part[rank]
        for posted, (source, theirs) in zip(rounds, received, strict=True):
            posted.wait()
            for x, arrived in zip(whole, theirs, strict=True):
                x[:count, heads[source]] += arrived
        return [heads_first(x) for x in whole]


class _Sorted:
    """Rows that several ranks hold, from the order of the ranks to their order in the pack, and back."""

    def __init__(self, parts: list[np.ndarray], device: torch.device):
        self.counts = [len(part) for part in parts]
        order = np.argsort(np.concatenate(parts), kind="stable")
        self.order = torch.from_numpy(order).to(device)
        self.back = torch.from_numpy(np.argsort(order, kind="stable")).to(device)

    def sorted(self, x: Tensor) -> Tensor:
        """[rows by rank, ...] -> [rows in order, ...]."""
        return x.index_select(0, self.order)

    def parted(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows in order, ...] -> each rank's rows."""
        return x.index_select(0, self.back).split(self.counts)


def build(
    division: Division, wires: tuple[Wire, Wire | None], outer: Callable[..., Any] | None, device: torch.device
) -> Ulysses:
    """wires: within the node, and between nodes (None: there is one node); outer: builds the exchange between nodes."""
    within, between = wires
    joined = division.joined(within.size)
    if between is None or outer is None:
        return Ulysses(division, within, AllRows(joined, device), device, 0)
    return Ulysses(division, within, outer(joined, between, device), device, between.rank)


def bytes_sent(division: Division, widths: Widths, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends within its node of `size` ranks (default: all), forward and backward: int64 [ranks]."""
    size = division.ranks if size is None else size
    heads = Heads(widths.heads, widths.kv_heads, size)
    key = [part.stop - part.start for part in heads.key]
    each = widths.heads // size
    rows, queries = (np.array([len(part) for part in parts]) for parts in (division.held, division.query))
    forward, backward = np.zeros(division.ranks, np.int64), np.zeros(division.ranks, np.int64)
    dim = widths.head_dim
    for rank in range(division.ranks):
        first = rank // size * size
        for peer in range(first, first + size):
            if peer == rank:
                continue
            keys = 2 * rows[rank] * key[peer - first] * dim * widths.activation
            wide = each * widths.lse
            forward[rank] += keys + queries[rank] * each * dim * widths.activation
            forward[rank] += queries[peer] * (each * dim * widths.activation + wide)
            backward[rank] += keys + queries[rank] * 2 * (each * dim * widths.activation + wide)
            returned = queries[peer] * each + 2 * rows[peer] * key[rank - first]
            backward[rank] += returned * dim * widths.gradient
    return forward, backward
