"""What every exchange that moves keys and values computes: the tiles of the local queries over one rank's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmask.attention.plan import TileBatch, tile_batches
from unmask.blocks.exchange.division import Division
from unmask.rows.tiles import rectangles

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Keys that come from rank `source`: how many rows, and the tiles over them."""

    source: int
    rows: int
    tiles: list[TileBatch]


def local_and_remote(
    division: Division, rank: int, device: torch.device, received: Sequence[tuple[int, np.ndarray]]
) -> tuple[list[TileBatch], list[Chunk]]:
    """Tiles over the rank's own keys, and a Chunk for each arrival, in the order they will be computed.

    received: (source, ascending row indices whose keys arrive), in that order.
    """
    query = division.query[rank]
    seen = np.zeros(max(1, len(query)), bool)
    own = tiles_over(division, query, division.held[rank], device, seen)
    return own, [Chunk(source, len(key), tiles_over(division, query, key, device, seen)) for source, key in received]


def tiles_over(
    division: Division, query: np.ndarray, key: np.ndarray, device: torch.device, seen: np.ndarray | None = None
) -> list[TileBatch]:
    """Tiles of the rows `query` over the rows `key`. seen: see `tile_batches`; None: no earlier tile touched any."""
    seen = np.zeros(max(1, len(query)), bool) if seen is None else seen
    return tile_batches(rectangles(division.rows, division.window, query, key), seen, device)


def flat(x: Tensor) -> Tensor:
    """[1, heads, rows, ...] -> [rows, heads, ...], contiguous (already so in transformers' layout)."""
    return x[0].transpose(0, 1).contiguous()


def heads_first(x: Tensor) -> Tensor:
    """[rows, heads, ...] -> [1, heads, rows, ...]; a view."""
    return x.transpose(0, 1)[None]


def buffer(like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """Room for `rows` rows of what `like` [1, heads, N, ...] holds, rows first: [rows, heads, ...]."""
    return like.new_empty((rows, like.shape[1], *like.shape[3:]), dtype=dtype)
