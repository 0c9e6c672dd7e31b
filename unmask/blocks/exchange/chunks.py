"""What every exchange that moves keys and values computes: the tiles of the local queries over one rank's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmask.attention.attend import lse_dtype
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

    def over(key: np.ndarray) -> list[TileBatch]:
        return tile_batches(rectangles(division.rows, division.window, query, key), seen, device)

    own = over(division.held[rank])
    return own, [Chunk(source, len(key), over(key)) for source, key in received]


def flat(x: Tensor) -> Tensor:
    """[1, heads, rows, ...] -> [rows, heads, ...], contiguous (already so in transformers' layout)."""
    return x[0].transpose(0, 1).contiguous()


def heads_first(x: Tensor) -> Tensor:
    """[rows, heads, ...] -> [1, heads, rows, ...]; a view."""
    return x.transpose(0, 1)[None]


def buffer(like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """Room for `rows` rows of what `like` [1, heads, N, ...] holds, rows first: [rows, heads, ...]."""
    return like.new_empty((rows, like.shape[1], *like.shape[3:]), dtype=dtype)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients of keys and values travel, and add up, in fp32 (fp64 for fp64)."""
    return lse_dtype(dtype)
