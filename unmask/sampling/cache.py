"""Attention of a packed batch of sequences, each against its own cached keys and values.

A pass sends rows of several sequences through the model side by side. Every sequence owns a region of each layer's key
and value buffers, as long as its canvas, and token p of a sequence lies at p in its region. What a row sees is then
an interval of its region, as in training (`unmask.rows`):

    noisy row of a block [s, e)    sees [0, e)                 window W: [s - (W - 1), e)
    clean row i                    sees [0, end of i's block)  window W: [i - (W - 1), end of i's block)

Rows of a segment that see the same are one rectangle; the others are cut into tiles. Nothing is copied or padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unmask.attention import flash
from unmask.attention.plan import TileBatch, tile_batches
from unmask.attention.tiles import Partial
from unmask.rows.tiles import Batch, tiles


class Segment(NamedTuple):
    """Positions [start, stop) of a sequence in a pass; clean: the size of clean blocks, 0 for one noisy block;
    seen: one past what a noisy block sees, where that is not `stop`."""

    sequence: int
    start: int
    stop: int
    clean: int
    seen: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def sees(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """(lo, hi) of every row: the positions of its sequence that it sees."""
        position = np.arange(self.start, self.stop)
        newest, hi = np.full_like(position, self.start), np.full_like(position, self.seen or self.stop)
        if self.clean:
            newest, hi = position, np.minimum((position // self.clean + 1) * self.clean, self.stop)
        lo = np.zeros_like(position) if window is None else np.maximum(newest - (window - 1), 0)
        return lo, hi


class Cache:
    """Keys and values of several sequences in every layer; lengths: positions of each."""

    def __init__(self, lengths: Sequence[int]):
        self.base = np.r_[0, np.cumsum(lengths)]
        self._buffers: dict[Any, tuple[Tensor, Tensor]] = {}

    def write(self, owner: Any, place: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put key and value [1, kv_heads, rows, head_dim] at `place` int64 [rows]; the owner's whole buffers."""
        if owner not in self._buffers:
            shape = (*key.shape[:2], int(self.base[-1]), key.shape[3])
            # Zeros: a masked cell of a tile may read what was never written.
            self._buffers[owner] = (key.new_zeros(shape), value.new_zeros(shape))
        for buffer, new in zip(self._buffers[owner], (key, value), strict=True):
            buffer.index_copy_(2, place, new)
        return self._buffers[owner]


class Reads:
    """The plan of one pass, in place of a `Plan`: its rows are written into the cache, and then see their intervals.

    keep: other passes read what this one writes; if none does, all layers share one pair of buffers.
    """

    def __init__(
        self,
        cache: Cache,
        segments: Sequence[Segment],
        windows: Sequence[int | None],
        device: torch.device,
        keep: bool = True,
    ):
        self.cache, self.keep = cache, keep
        place = [np.arange(s.start, s.stop) + cache.base[s.sequence] for s in segments]
        self.place = torch.from_numpy(np.concatenate(place)).to(device)
        self.batches = {window: rectangles(cache.base, segments, window, device) for window in windows}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, None]:
        """query [1, heads, rows, head_dim] -> [1, rows, heads, head_dim]; called by the model's attention layers."""
        owner = module if self.keep else (key.shape[1], key.shape[3], key.dtype)
        key, value = self.cache.write(owner, self.place, key, value)
        batches = self.batches[window]
        if len(batches) == 1 and batches[0].q.count == 1 and batches[0].mask is None:
            of = batches[0].k.of
            out, _ = flash.forward(query, of(key), of(value), None, scale)
        else:
            partial = Partial(query, scale)
            partial.add(key, value, batches)
            out, _ = partial.result()
        return out.transpose(1, 2), None


def rectangles(
    base: np.ndarray, segments: Sequence[Segment], window: int | None, device: torch.device
) -> list[TileBatch]:
    """Tiles that hold every (row of the pass, position of the cache) pair of `segments` once."""
    rows = sum(map(len, segments))
    lo, hi = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    alike: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    first = 0
    for segment in segments:
        low, high = segment.sees(window)
        begin, part = base[segment.sequence], slice(first, first + len(segment))
        if (low == low[0]).all() and (high == high[0]).all():
            alike[len(segment), int(high[0] - low[0])].append((first, int(begin + low[0])))
        else:
            lo[part], hi[part] = low + begin, high + begin
        first += len(segment)
    batches = [batch for (n, keys), members in alike.items() for batch in _batches(np.array(members), n, keys)]
    batches += tiles(lo, hi) if (hi > lo).any() else []
    return tile_batches(batches, np.zeros(rows, bool), device)


def _batches(members: np.ndarray, rows: int, keys: int) -> list[Batch]:
    """One batch where the rectangles (query row, key) are evenly spaced, so that they are views; else one each."""
    steps = np.diff(members, axis=0)
    if len(members) == 1 or ((steps == steps[0]).all() and (steps[0] >= (rows, keys)).all()):
        return [Batch(members[:, 0], rows, members[:, 1], keys, None)]
    return [Batch(member[:1], rows, member[1:], keys, None) for member in members]
