"""Plan: what attention must know about one pack, derived from Rows and from nothing else.

A Plan holds one Pattern for every kind of attention in the model (full, each sliding window) and, for a last layer
that computes labelled rows only, one more with those rows as queries. A Pattern is a list of rectangle batches in
tensors, plus the dense mask it stands for. Kernels receive `pattern.handle`, a 0-d int64 tensor: a key into a weak
registry, so that a compiled layer sees the same graph for every pack. Keep the Plan alive until backward has ended.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.rows import Rows
from unmask.rows.tiles import Batch, rectangles

_patterns: weakref.WeakValueDictionary[int, Pattern] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Span:
    """n slices [start[i], start[i] + size) of a row dimension: a strided view when evenly spaced, else an index."""

    def __init__(self, start: np.ndarray, size: int, device: torch.device):
        self.count, self.size, self.first = len(start), size, int(start[0])
        steps = np.diff(start)
        self.step = int(steps[0]) if len(steps) else size
        self.disjoint = bool((np.diff(np.sort(start)) >= size).all())
        self.index: Tensor | None = None
        if (steps != self.step).any() or self.step < 0 or not self.disjoint:
            index = start[:, None] + np.arange(size)
            self.index = torch.from_numpy(index.reshape(-1)).to(device)

    def of(self, x: Tensor) -> Tensor:
        """x [1, heads, rows, ...] -> [n, heads, size, ...]; a view of x unless the slices are irregular."""
        if self.count == 1:
            return x.narrow(2, self.first, self.size)
        if self.index is not None:
            # Rows first, as they lie in memory: index_select would copy all of a transposed tensor.
            return (
                x[0].transpose(0, 1).index_select(0, self.index).unflatten(0, (self.count, self.size)).transpose(1, 2)
            )
        _, head, row, *rest = x.stride()
        shape = (self.count, x.shape[1], self.size, *x.shape[3:])
        return x.as_strided(shape, (self.step * row, head, row, *rest), x.storage_offset() + self.first * row)

    def put(self, x: Tensor, value: Tensor) -> None:
        """x[slices] = value, for slices that do not overlap."""
        if self.index is None or self.count == 1:
            self.of(x).copy_(value)
        else:
            x[0].transpose(0, 1).index_copy_(0, self.index, value.transpose(1, 2).flatten(0, 1).to(x.dtype))

    def add(self, x: Tensor, value: Tensor) -> None:
        """x[slices] += value; overlapping slices add up."""
        if self.index is None or self.count == 1:
            self.of(x).add_(value)
        else:
            x[0].transpose(0, 1).index_add_(0, self.index, value.transpose(1, 2).flatten(0, 1).to(x.dtype))


class TileBatch:
    """A rows.tiles.Batch in tensors. `first`: no earlier batch has touched these rows, so there is nothing to merge."""

    def __init__(self, batch: Batch, first: bool, device: torch.device):
        self.q = Span(batch.q, batch.rows, device)
        self.k = Span(batch.k, batch.keys, device)
        self.first = first
        self.mask = None if batch.mask is None else torch.from_numpy(batch.mask).to(device)
        empty = None if batch.mask is None else ~batch.mask.any(1)
        self.empty = None if empty is None or not empty.any() else torch.from_numpy(empty).to(device)
        self._bias: dict[torch.dtype, Tensor] = {}

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as additive floats [rows, keys]: 0 where attended, -inf elsewhere; None for a full tile."""
        if self.mask is None:
            return None
        if dtype not in self._bias:
            zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._bias[dtype] = zeros.masked_fill_(~self.mask, float("-inf"))
        return self._bias[dtype]


def tile_batches(batches: Sequence[Batch], seen: np.ndarray, device: torch.device) -> list[TileBatch]:
    """The batches in tensors. seen: bool [queries], rows that earlier batches touched; it is brought up to date."""
    made = []
    for batch in batches:
        touched = (batch.q[:, None] + np.arange(batch.rows)).reshape(-1)
        made.append(TileBatch(batch, not seen[touched].any(), device))
        seen[touched] = True
    return made


class Pattern:
    """Attention of one kind over one pack: Q query rows against K key rows.

    rows: the pack; window: the sliding window in tokens, or None; query: ascending indices of the rows that have
    queries (None: all of them). Keys are always all rows.
    """

    def __init__(self, rows: Rows, window: int | None, query: np.ndarray | None, backend: str, device: torch.device):
        self.rows, self.window, self.query = rows, window, query
        self.backend, self.device = backend, device
        self.queries = len(rows) if query is None else len(query)
        self.keys = len(rows)
        #: FlexAttention's form of the pattern, where that backend has made it.
        self.flex: Any = None
        number = next(_numbers)
        self.handle = torch.tensor(number)
        _patterns[number] = self

    @cached_property
    def batches(self) -> list[TileBatch]:
        """Rectangles that hold every attended pair once, largest first."""
        return tile_batches(rectangles(self.rows, self.window, self.query), np.zeros(self.queries, bool), self.device)

    @cached_property
    def mask(self) -> Tensor:
        """The dense mask, bool [Q, K]: what the reference backend and small pictures use."""
        dense = torch.from_numpy(self.rows.dense_mask(self.window))
        return (dense if self.query is None else dense[torch.from_numpy(self.query)]).to(self.device)


class Plan:
    """The patterns of one pack, by sliding window (None: full attention)."""

    def __init__(self, patterns: dict[tuple[int | None, bool], Pattern], labelled: Tensor | None = None):
        self._patterns = patterns
        #: Row indices, int64, that a last layer keeps; None when every layer computes all rows.
        self.labelled = labelled
        self.handles = {key: pattern.handle for key, pattern in patterns.items()}

    @classmethod
    def from_rows(
        cls,
        rows: Rows,
        windows: Iterable[int | None] = (None,),
        *,
        query: np.ndarray | None = None,
        backend: str = "auto",
        device: str | torch.device = "cpu",
        labelled_window: int | str | None = "none",
    ) -> Plan:
        """Plan for `rows`, one pattern per attention kind in `windows`.

        query: ascending indices of the rows that have queries, in all layers (None: all rows).
        labelled_window: the window of a last layer whose queries are the labelled rows only ("none": no such layer).
        """
        device = torch.device(device)
        backend = choose_backend(backend, device)
        patterns = {(window, False): Pattern(rows, window, query, backend, device) for window in windows}
        if isinstance(labelled_window, str):
            return cls(patterns)
        labelled = rows.labelled
        patterns[labelled_window, True] = Pattern(rows, labelled_window, labelled, backend, device)
        return cls(patterns, torch.from_numpy(labelled).to(device))

    def handle(self, window: int | None, labelled: bool = False) -> Tensor:
        """The handle of one kind; KeyError when the plan was not made for it."""
        return self.handles[window, labelled]

    def pattern(self, window: int | None = None, labelled: bool = False) -> Pattern:
        return self._patterns[window, labelled]


def lookup(handle: Tensor) -> Pattern:
    """The pattern behind a handle; RuntimeError when its Plan is gone."""
    pattern = _patterns.get(int(handle))
    if pattern is None:
        raise RuntimeError("attend: the Plan of this pack was freed; keep it alive until backward has ended")
    return pattern


def choose_backend(name: str, device: torch.device) -> str:
    """`auto` is `tiles` on every device. UserError: `flex` on a device where it has no backward."""
    if name == "flex" and device.type == "cpu":
        raise UserError("model.attention=flex: FlexAttention has no backward on CPU; use tiles")
    return "tiles" if name == "auto" else name
