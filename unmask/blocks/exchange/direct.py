"""Direct exchange: every rank sends keys and values straight to those that read them, and gets their gradients back.

Round after round rank r sends a piece to r + s and receives one from r - s, s = 1 .. P-1. All rounds are posted at once
and go over the network one after another, so that the first piece can be computed while the next is on its way; local
tiles come first. Backward fetches again (nothing remote was saved) and returns dk and dv piece by piece, with half of
the local tiles before the first arrival and half after the last, while the last gradients travel. `gather` sends all
shared rows to everyone, `needed` to each rank what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmask.attention.attend import lse_dtype
from unmask.attention.plan import TileBatch
from unmask.attention.tiles import Gradients, Partial, narrowed
from unmask.blocks.exchange.chunks import Pair, buffer, flat, heads_first, local_and_remote
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.wire import Round, Wire

#: Which of `owner`'s shared rows `reader` gets: ascending positions.
Choice = Callable[[Division, int, int], np.ndarray]

#: About so many pieces arrive in all; a piece is a multiple of the largest of these numbers of rows that it can hold,
#: for the sake of its tiles, and has no fewer than the smallest.
PIECES, GRIDS = 6, (1024, 512, 256)


@dataclass(frozen=True)
class Sent:
    """What `reader` gets of our shared rows in one round: `rows` of them, from `first` on or at `index`."""

    reader: int
    rows: int
    first: int
    index: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        """The rows of x [rows, heads, head_dim]."""
        return x[self.first : self.first + self.rows] if self.index is None else x.index_select(0, self.index)

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add `part` to these rows of x."""
        if self.index is None:
            x[self.first : self.first + self.rows].add_(part)
        else:
            x.index_add_(0, self.index, part)


class Direct:
    """Attention of one kind over a divided pack; made once per plan."""

    def __init__(self, division: Division, wire: Wire, device: torch.device, choose: Choice):
        self.wire = wire
        rank, ranks = wire.rank, wire.size
        received: list[tuple[int, np.ndarray]] = []
        #: What we send in each round, and to whom.
        self.sends: list[Sent] = []
        for shift in range(1, ranks):
            reader, source = (rank + shift) % ranks, (rank - shift) % ranks
            ours, theirs = choose(division, reader, rank), choose(division, rank, source)
            # As many rounds on every rank: the number depends on the whole division only.
            count = max(1, min(-(-PIECES // (ranks - 1)), max(map(len, division.shared)) // GRIDS[-1]))
            for mine, its in zip(_pieces(ours, count), _pieces(theirs, count), strict=True):
                received.append((source, division.shared[source][its]))
                self.sends.append(_sent(reader, mine, device))
        self.local, self.chunks = local_and_remote(division, rank, device, received)
        self.before, self.after = _halves(self.local)

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
        dk, dv = gradients.zeros(k, v)
        gradients.add(k, v, self.before, (dk, dv))
        returning = []
        for chunk, sent, (arrival, keys, values) in zip(self.chunks, self.sends, arrivals, strict=True):
            arrival.wait()
            theirs = gradients.add(keys, values, chunk.tiles)
            returning.append(self._give_back(chunk.source, theirs, sent, k))
        gradients.add(k, v, self.after, (dk, dv))
        for sent, (arrival, ours) in zip(self.sends, returning, strict=True):
            arrival.wait()
            for total, part in zip((dk, dv), ours, strict=True):
                sent.add(total[0].transpose(0, 1), part)
        return narrowed(gradients.dq, q.dtype), narrowed(dk, k.dtype), narrowed(dv, v.dtype)

    def _fetch(self, k: Tensor, v: Tensor) -> list[tuple[Round, Tensor, Tensor]]:
        """Post every round; the arrivals, in the order of the chunks, with the tensors they fill."""
        ours = flat(k), flat(v)
        arrivals = []
        for sent, chunk in zip(self.sends, self.chunks, strict=True):
            keys, values = (buffer(x, chunk.rows) for x in (k, v))
            arrival = self.wire.post(
                "keys and values",
                [(sent.reader, sent.of(x)) for x in ours],
                [(chunk.source, keys), (chunk.source, values)],
            )
            arrivals.append((arrival, heads_first(keys), heads_first(values)))
        return arrivals

    def _give_back(self, source: int, theirs: Pair, sent: Sent, like: Tensor) -> tuple[Round, Pair]:
        """Return dk and dv to their owner, and receive what our reader of the same round found."""
        wide = lse_dtype(like.dtype)
        ours = buffer(like, sent.rows, wide), buffer(like, sent.rows, wide)
        sends = [(source, flat(x)) for x in theirs]
        return self.wire.post("gradients", sends, [(sent.reader, x) for x in ours]), ours


def _pieces(chosen: np.ndarray, count: int) -> list[np.ndarray]:
    """`chosen` in `count` pieces (some may be empty)."""
    grid = next((grid for grid in GRIDS if len(chosen) >= grid * count), None)
    if grid is None and len(chosen) >= GRIDS[-1]:
        grid = GRIDS[-1]
    edges = np.linspace(0, len(chosen), count + 1)[1:-1]
    return np.split(chosen, (np.round(edges / (grid or 1)) * (grid or 1)).astype(int))


def _sent(reader: int, chosen: np.ndarray, device: torch.device) -> Sent:
    """chosen: ascending positions among our shared rows; a run of neighbours is sent without a copy."""
    first = int(chosen[0]) if len(chosen) else 0
    run = len(chosen) == 0 or int(chosen[-1]) - first == len(chosen) - 1
    return Sent(reader, len(chosen), first, None if run else torch.from_numpy(chosen).to(device))


def _halves(tiles: list[TileBatch]) -> tuple[list[TileBatch], list[TileBatch]]:
    """The tiles in two parts of about equal work."""
    cells = np.cumsum([batch.q.count * batch.q.size * batch.k.size for batch in tiles])
    middle = int(np.searchsorted(cells, cells[-1] / 2)) if len(tiles) else 0
    return tiles[:middle], tiles[middle:]


@dataclass
class DirectExchange:
    """The exchange that sends the chosen rows straight to their readers."""

    choose: Choice

    def build(self, division: Division, wire: Wire, device: torch.device) -> Direct:
        return Direct(division, wire, device, self.choose)

    def bytes_sent(self, division: Division, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
        """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]."""
        ranks = range(division.ranks)
        rows = np.array([[len(self.choose(division, b, a)) if a != b else 0 for b in ranks] for a in ranks])
        keys = 2 * widths.key * widths.activation * rows.sum(1)
        return keys, keys + 2 * widths.key * widths.gradient * rows.sum(0)


#: All shared rows, to every rank. Bytes summed over ranks, S shared rows: 2 S D_kv s (P-1) forward,
#: 2 S D_kv (s + g) (P-1) backward.
gather = DirectExchange(lambda division, reader, owner: np.arange(len(division.shared[owner])))
#: What a rank reads: the gain is whatever windows, packed documents and short prefixes leave unread.
needed = DirectExchange(Division.read)
