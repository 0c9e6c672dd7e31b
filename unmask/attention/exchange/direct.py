"""Direct exchange: every rank sends keys and values straight to those that read them, and gets their gradients back.

In round s = 1 .. P-1 rank r sends to r + s and receives from r - s; all rounds are posted at once, local tiles are
computed while they travel, then each arrival as it is needed. Backward fetches again (nothing remote was saved), and in
round s returns dk and dv to r - s while the next chunk is computed. `gather` sends all shared rows to everyone,
`needed` to each rank what it reads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unmask.attention.exchange.chunks import Pair, buffer, flat, gradient_dtype, heads_first, local_and_remote
from unmask.attention.exchange.division import Division, Widths
from unmask.attention.exchange.wire import Round, Wire
from unmask.attention.tiles import Gradients, Partial, narrowed

#: Which of `owner`'s shared rows `reader` gets: ascending positions.
Choice = Callable[[Division, int, int], np.ndarray]


class Direct:
    """Attention of one kind over a divided pack; made once per plan."""

    def __init__(self, division: Division, wire: Wire, device: torch.device, choose: Choice):
        self.wire = wire
        rank, ranks = wire.rank, wire.size
        sources = [(rank - shift) % ranks for shift in range(1, ranks)]
        received = {source: division.shared[source][choose(division, rank, source)] for source in sources}
        self.local, self.chunks = local_and_remote(division, rank, device, received)
        #: For each round, who gets which of our rows (None: the first n of them, n).
        self.sends: list[tuple[int, Tensor | None, int]] = []
        for shift in range(1, ranks):
            reader = (rank + shift) % ranks
            chosen = choose(division, reader, rank)
            every = len(chosen) == len(division.shared[rank])
            self.sends.append((reader, None if every else torch.from_numpy(chosen).to(device), len(chosen)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Pair:
        """out and lse of the local queries."""
        arrivals = self._fetch(k, v)
        partial = Partial(q, scale)
        partial.add(k, v, self.local)
        for chunk, (arrival, keys, values) in zip(self.chunks, arrivals, strict=True):
            arrival.wait()
            partial.add(keys, values, chunk.tiles)
        return partial.result()

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of the local rows. saved: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        arrivals = self._fetch(k, v)
        gradients = Gradients(grad, (q, out, lse), scale)
        dk, dv = gradients.add(k, v, self.local)
        returning = []
        for chunk, sent, (arrival, keys, values) in zip(self.chunks, self.sends, arrivals, strict=True):
            arrival.wait()
            theirs = gradients.add(keys, values, chunk.tiles) if chunk.rows else (keys, values)
            returning.append(self._give_back(chunk.source, theirs, sent, k))
        for (_, index, rows), (arrival, ours) in zip(self.sends, returning, strict=True):
            arrival.wait()
            for total, part in zip((dk, dv), ours, strict=True):
                mine = total[0].transpose(0, 1)
                mine[:rows].add_(part) if index is None else mine.index_add_(0, index, part)
        return narrowed(gradients.dq, q.dtype), narrowed(dk, k.dtype), narrowed(dv, v.dtype)

    def _fetch(self, k: Tensor, v: Tensor) -> list[tuple[Round, Tensor, Tensor]]:
        """Post every round; the arrivals, in the order of the chunks, with the tensors they fill."""
        ours = flat(k), flat(v)
        arrivals = []
        for (reader, index, rows), chunk in zip(self.sends, self.chunks, strict=True):
            keys, values = (buffer(x, chunk.rows) for x in (k, v))
            sent = [x[:rows] if index is None else x.index_select(0, index) for x in ours]
            arrival = self.wire.post(
                "keys and values",
                [(reader, x) for x in sent],
                [(chunk.source, keys), (chunk.source, values)],
            )
            arrivals.append((arrival, heads_first(keys), heads_first(values)))
        return arrivals

    def _give_back(
        self, source: int, theirs: Pair, sent: tuple[int, Tensor | None, int], like: Tensor
    ) -> tuple[Round, Pair]:
        """Return dk and dv to their owner, and receive what our reader of the same round found."""
        reader, _, rows = sent
        wide = gradient_dtype(like.dtype)
        ours = buffer(like, rows, wide), buffer(like, rows, wide)
        arrival = self.wire.post("gradients", [(source, flat(x)) for x in theirs], [(reader, x) for x in ours])
        return arrival, ours


def bytes_sent(division: Division, widths: Widths, choose: Choice) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]."""
    ranks = range(division.ranks)
    rows = np.array([[len(choose(division, b, a)) if a != b else 0 for b in ranks] for a in ranks])
    keys = 2 * widths.key * widths.activation * rows.sum(1)
    return keys, keys + 2 * widths.key * widths.gradient * rows.sum(0)
