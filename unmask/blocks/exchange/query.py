"""query: the noisy queries travel, and partial results come back; keys and values stay where they are.

For layers whose clean rows have no queries (a last layer that computes labelled rows only, a drafter, a frozen prompt):
each rank computes everybody's queries over its own clean keys and returns (out, lse), which merge exactly. The volume,
M (2 D_q + H) (P-1) elements forward and M (3 D_q + 2 H) (P-1) backward for M noisy queries, does not grow with the
context. Backward sends q, dout, lse and delta = sum(dout * out), the only form in which out enters the gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unmask.attention.attend import lse_dtype
from unmask.attention.tiles import Gradients, Partial, narrowed
from unmask.blocks.exchange.chunks import Pair, buffer, flat, heads_first, tiles_over
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.wire import Wire
from unmask.errors import UserError


class Query:
    """Attention of one kind over a divided pack whose clean rows have no queries; made once per plan."""

    def __init__(self, division: Division, wire: Wire, device: torch.device):
        self.wire = wire
        rank, ranks = wire.rank, wire.size
        self.local = tiles_over(division, division.query[rank], division.held[rank], device)
        self.shared = len(division.shared[rank])
        #: (who gets our queries, whose we get, how many, their tiles over our keys) of every round.
        self.rounds = []
        for shift in range(1, ranks):
            to, source = (rank + shift) % ranks, (rank - shift) % ranks
            query = division.query[source]
            self.rounds.append((to, source, len(query), tiles_over(division, query, division.shared[rank], device)))
        self.queries = len(division.query[rank])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Pair:
        """out and lse of the local queries."""
        ours = flat(q)[: self.queries]
        arrivals = []
        for to, source, rows, _ in self.rounds:
            theirs = buffer(q, rows)
            arrivals.append((self.wire.post("queries", [(to, ours)], [(source, theirs)]), theirs))
        partial = Partial(q, scale)
        partial.add(k, v, self.local)
        returning = []
        for (to, source, rows, tiles), (arrival, theirs) in zip(self.rounds, arrivals, strict=True):
            arrival.wait()
            for_them = Partial(heads_first(theirs), scale)
            if rows:
                for_them.add(k, v, tiles)
            out, lse = for_them.result()
            back = buffer(q, self.queries), buffer(partial.lse, self.queries)
            sends = [(source, flat(out)), (source, flat(lse))]
            returning.append((self.wire.post("partial results", sends, [(to, x) for x in back]), back))
        for arrival, (out, lse) in returning:
            arrival.wait()
            if self.queries:
                partial.merge(heads_first(out), heads_first(lse))
        return partial.result()

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of the local rows. saved: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        wide = lse_dtype(q.dtype)
        delta = (grad.to(wide) * out.to(wide)).sum(-1)
        ours = [flat(x)[: self.queries] for x in (q, grad, lse, delta)]
        arrivals = []
        for to, source, rows, _ in self.rounds:
            theirs = [buffer(x, rows) for x in (q, grad, lse, delta)]
            posted = self.wire.post("queries", [(to, x) for x in ours], [(source, x) for x in theirs])
            arrivals.append((posted, theirs))
        gradients = Gradients(grad, (q, out, lse), scale)
        dk, dv = gradients.add(k, v, self.local)
        returning = []
        for (to, source, rows, tiles), (arrival, received) in zip(self.rounds, arrivals, strict=True):
            arrival.wait()
            their_q, their_grad, their_lse, their_delta = (heads_first(x) for x in received)
            found = (
                self._for_them((their_q, their_grad, their_lse, their_delta), (k, v, dk, dv), tiles, scale)
                if rows
                else received[0].to(wide)
            )
            back = buffer(q, self.queries, wide)
            returning.append((self.wire.post("gradients", [(source, found)], [(to, back)]), back))
        for arrival, back in returning:
            arrival.wait()
            gradients.dq[0].transpose(0, 1)[: self.queries].add_(back)
        return narrowed(gradients.dq, q.dtype), narrowed(dk, k.dtype), narrowed(dv, v.dtype)

    @staticmethod
    def _for_them(received: tuple[Tensor, ...], ours: tuple[Tensor, ...], tiles: list, scale: float) -> Tensor:
        """dq of another rank's queries over our keys, [rows, heads, head_dim]; our dk and dv grow."""
        q, grad, lse, delta = received
        k, v, dk, dv = ours
        gradients = Gradients(grad, (q, stand_in(grad, delta), lse), scale)
        gradients.add(k, v, tiles, (dk, dv))
        return flat(gradients.dq)


def stand_in(grad: Tensor, delta: Tensor) -> Tensor:
    """A tensor like `out` with sum(grad * it, -1) = delta, which is all a flash backward reads of out.

    Everything stands in the component where |grad| is largest; where grad is zero, so is delta.
    """
    largest = grad.abs().argmax(-1, keepdim=True)
    value = grad.gather(-1, largest).to(delta.dtype)
    quotient = torch.where(value == 0, torch.zeros_like(value), delta[..., None] / value)
    return torch.zeros_like(grad, dtype=delta.dtype).scatter_(-1, largest, quotient)


def build(division: Division, wire: Wire, device: torch.device) -> Query:
    if not division.noisy_queries:
        raise UserError(
            "parallel.exchange=query: clean rows have queries in this layer; use auto, gather, ring or needed"
        )
    return Query(division, wire, device)


def bytes_sent(division: Division, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]."""
    queries = np.array([len(rows) for rows in division.query])
    others = queries.sum() - queries
    there = widths.query * widths.activation
    lse = widths.heads * widths.lse
    forward = queries * (division.ranks - 1) * there + others * (there + lse)
    backward = queries * (division.ranks - 1) * 2 * (there + lse) + others * widths.query * widths.gradient
    return forward, backward
