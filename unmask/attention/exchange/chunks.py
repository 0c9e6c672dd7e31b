"""What every exchange that moves keys and values computes: the tiles of the local queries over one rank's keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unmask.attention.attend import lse_dtype
from unmask.attention.exchange.division import Division
from unmask.attention.plan import TileBatch, tile_batches
from unmask.rows.tiles import rectangles

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Keys of rank `source`, n of its shared rows, and the tiles over them; sent: how many of ours the reader gets."""

    source: int
    rows: int
    tiles: list[TileBatch]


def local_and_remote(
    division: Division, rank: int, device: torch.device, received: dict[int, np.ndarray]
) -> tuple[list[TileBatch], list[Chunk]]:
    """Tiles over the rank's own keys, and a Chunk for each source, in the order they will be computed.

    received: for each source, in that order, the ascending row indices whose keys arrive.
    """
    query = division.query[rank]
    seen = np.zeros(max(1, len(query)), bool)

    def over(key: np.ndarray) -> list[TileBatch]:
        return tile_batches(rectangles(division.rows, division.window, query, key), seen, device)

    own = over(division.held[rank])
    return own, [Chunk(source, len(key), over(key)) for source, key in received.items()]


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
