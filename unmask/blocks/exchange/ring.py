"""ring: keys and values go round, one chunk at a time; the next is on its way while the present one is computed.

In hop h = 1 .. P-1 a rank works on the chunk of rank r - h and passes it on to r + 1. In backward the chunk's dk and dv
travel one hop behind: the first rank to work on a chunk starts their sums, the last one sends them home, which makes
P-1 hops as well. As many bytes as `gather`, with one remote chunk in memory instead of P-1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unmask.attention.attend import lse_dtype
from unmask.attention.tiles import Gradients, Partial, narrowed
from unmask.blocks.exchange.chunks import Pair, buffer, flat, heads_first, local_and_remote
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.wire import Round, Wire


class Ring:
    """Attention of one kind over a divided pack; made once per plan."""

    def __init__(self, division: Division, wire: Wire, device: torch.device):
        self.wire = wire
        ranks = wire.size
        self.next, self.previous = (wire.rank + 1) % ranks, (wire.rank - 1) % ranks
        self.shared = len(division.shared[wire.rank])
        sources = [(wire.rank - hop) % ranks for hop in range(1, ranks)]
        self.local, self.chunks = local_and_remote(
            division, wire.rank, device, [(source, division.shared[source]) for source in sources]
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Pair:
        """out and lse of the local queries."""
        partial = Partial(q, scale)
        current: Pair = flat(k)[: self.shared], flat(v)[: self.shared]
        for hop, chunk in enumerate([None, *self.chunks]):
            arrival, following = self._pass_on(current, hop, k)
            if chunk is None:
                partial.add(k, v, self.local)
            else:
                partial.add(heads_first(current[0]), heads_first(current[1]), chunk.tiles)
            arrival.wait()
            current = following
        return partial.result()

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of the local rows. saved: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        gradients = Gradients(grad, (q, out, lse), scale)
        current: Pair = flat(k)[: self.shared], flat(v)[: self.shared]
        arrival, following = self._pass_on(current, 0, k)
        dk, dv = gradients.add(k, v, self.local)
        sums: tuple[Round, Pair] | None = None
        for hop, chunk in enumerate(self.chunks, 1):
            arrival.wait()
            current = following
            arrival, following = self._pass_on(current, hop, k)
            parts = gradients.add(heads_first(current[0]), heads_first(current[1]), chunk.tiles)
            theirs = flat(parts[0]), flat(parts[1])
            if sums is not None:
                sums[0].wait()
                for part, earlier in zip(theirs, sums[1], strict=True):
                    part.add_(earlier)
            sums = self._send_sums(theirs, hop, k)
        if sums is not None:
            sums[0].wait()
            for total, part in zip((dk, dv), sums[1], strict=True):
                total[0].transpose(0, 1)[: self.shared].add_(part)
        return narrowed(gradients.dq, q.dtype), narrowed(dk, k.dtype), narrowed(dv, v.dtype)

    def _pass_on(self, current: Pair, hop: int, like: Tensor) -> tuple[Round, Pair]:
        """Begin to send the present chunk on and to receive the next; after the last hop there is none."""
        if hop == len(self.chunks):
            return self.wire.post("keys and values", [], []), current
        rows = self.chunks[hop].rows
        following = buffer(like, rows), buffer(like, rows)
        sends = [(self.next, x) for x in current]
        return self.wire.post("keys and values", sends, [(self.previous, x) for x in following]), following

    def _send_sums(self, theirs: Pair, hop: int, like: Tensor) -> tuple[Round, Pair]:
        """Send a chunk's dk and dv after it, and receive those of the next chunk, or at last our own."""
        rows = self.chunks[hop].rows if hop < len(self.chunks) else self.shared
        wide = lse_dtype(like.dtype)
        ours = buffer(like, rows, wide), buffer(like, rows, wide)
        sends = [(self.next, x) for x in theirs]
        return self.wire.post("gradients", sends, [(self.previous, x) for x in ours]), ours


def build(division: Division, wire: Wire, device: torch.device) -> Ring:
    return Ring(division, wire, device)


def bytes_sent(division: Division, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]."""
    shared = np.array([len(rows) for rows in division.shared])
    passed = shared.sum() - np.roll(shared, -1)  # everything but the next rank's own chunk
    keys = 2 * widths.key * widths.activation * passed
    # A chunk's sums go through every rank but its owner.
    return keys, keys + 2 * widths.key * widths.gradient * (shared.sum() - shared)
