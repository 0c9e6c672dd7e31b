"""Division: how the rows of one pack lie on the ranks of the block axis, and what each rank reads of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from unmask.blocks.placement import Shared
from unmask.rows import Rows
from unmask.rows.rows import covered


@dataclass(frozen=True, eq=False)
class Division:
    """One pack under one kind of attention. Every tuple has an entry per rank, of ascending row indices.

    held: the rows a rank computes; query: those of them that have queries in this layer; shared: those whose keys and
    values others may read, always the first of `held`; labelled: only labelled rows have queries. A rank
    that holds nothing computes one inert row instead.
    """

    rows: Rows
    window: int | None
    held: tuple[np.ndarray, ...]
    query: tuple[np.ndarray, ...]
    shared: tuple[np.ndarray, ...]
    labelled: bool = False

    @classmethod
    def of(
        cls,
        rows: Rows,
        owner: np.ndarray,
        ranks: int,
        shared: Shared,
        window: int | None = None,
        labelled: bool = False,
    ) -> Division:
        """From an owner per row."""
        held = tuple(np.flatnonzero(owner == rank) for rank in range(ranks))
        chosen = rows.labelled if labelled else None
        query = held if chosen is None else tuple(chosen[owner[chosen] == rank] for rank in range(ranks))
        limit = rows.clean if shared == "clean" else len(rows)
        shared_rows = tuple(index[: np.searchsorted(index, limit)] for index in held)
        return cls(rows, window, held, query, shared_rows, labelled)

    @property
    def ranks(self) -> int:
        return len(self.held)

    def joined(self, size: int) -> Division:
        """The division over groups of `size` neighbouring ranks, each holding what its ranks hold."""

        def join(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(np.sort(np.concatenate(parts[i : i + size])) for i in range(0, len(parts), size))

        return Division(self.rows, self.window, join(self.held), join(self.query), join(self.shared), self.labelled)

    @cached_property
    def noisy_queries(self) -> bool:
        """Whether no clean row has a query: then noisy queries may travel instead of clean keys."""
        return all(len(query) == 0 or query[0] >= self.rows.clean for query in self.query)

    @cache  # noqa: B019 (a division lives as long as its plan)
    def read(self, reader: int, owner: int) -> np.ndarray:
        """Which of `owner`'s shared rows some query of `reader` attends: ascending positions in shared[owner]."""
        rows, query, shared = self.rows, self.query[reader], self.shared[owner]
        lo, hi = (bound[query] for bound in rows.interval(self.window))
        seen = covered(lo, hi, rows.clean)
        noisy = query[query >= rows.clean]
        start = self._block_start[noisy - rows.clean]
        own = covered(start - rows.clean, start - rows.clean + rows.reach[noisy], len(rows) - rows.clean)
        return np.flatnonzero(np.r_[seen, own][shared])

    @cached_property
    def _block_start(self) -> np.ndarray:
        """First row of the block of every noisy row."""
        starts, sizes = self.rows.blocks()
        return np.repeat(starts, sizes)


@dataclass(frozen=True)
class Widths:
    """What one row of a layer takes on the wire.

    heads, kv_heads, head_dim: of queries, and of keys and values; activation, gradient, lse: bytes per element.
    """

    heads: int
    kv_heads: int
    head_dim: int
    activation: int = 4
    gradient: int = 4
    lse: int = 4

    @property
    def query(self) -> int:
        """D_q, elements of a query row."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """D_kv, elements of a key row (and of a value row)."""
        return self.kv_heads * self.head_dim
