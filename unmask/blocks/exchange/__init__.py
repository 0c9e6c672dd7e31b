"""Exchanges: how attention reaches the keys that other ranks of the block axis hold.

    gather    every shared key and value to every rank, while local tiles are computed
    ring      round the ranks one chunk at a time, the next on its way
    needed    only the rows that somebody reads: windows, packed documents, short prefixes
    query     the noisy queries travel instead, and partial results come back; where clean rows have no queries
    ulysses   heads are divided instead of rows; `ulysses+ring` (+gather, +needed): within nodes, and between them
    auto      whichever of needed, query and ulysses sends the fewest bytes in this layer and pack

All return the same numbers as one rank. Forward saves only local tensors; backward fetches again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from unmask.blocks.exchange import query, ring, ulysses
from unmask.blocks.exchange.division import Division, Widths
from unmask.blocks.exchange.wire import Traffic, Wire
from unmask.config.rules import heads_fit
from unmask.errors import UserError
from unmask.registry import Registry

__all__ = [
    "Axis",
    "Division",
    "Traffic",
    "Widths",
    "Wire",
    "build",
    "bytes_sent",
    "exchanges",
    "query",
    "resolve",
    "ring",
    "ulysses",
]

#: Modules or objects with build(division, wire, device) and bytes_sent(division, widths).
exchanges = Registry(
    "exchange",
    {
        "gather": "unmask.blocks.exchange.direct:gather",
        "needed": "unmask.blocks.exchange.direct:needed",
        "ring": "unmask.blocks.exchange:ring",
        "query": "unmask.blocks.exchange:query",
        "ulysses": "unmask.blocks.exchange:ulysses",
    },
)


@dataclass
class Axis:
    """The block axis as attention uses it. within, between: the ranks of a node, and their peers in other nodes."""

    wire: Wire
    within: Wire | None = None
    between: Wire | None = None
    traffic: Traffic = field(default_factory=Traffic)


def resolve(name: str, division: Division, widths: Widths) -> str:
    """The exchange used for this layer and pack: `auto` by bytes; `query` where it applies, else `needed`."""
    if name == "query":
        return "query" if division.noisy_queries else "needed"
    if name != "auto":
        return name
    candidates = ["needed"]
    if division.noisy_queries:
        candidates.append("query")
    if heads_fit(widths.heads, widths.kv_heads, division.ranks):
        candidates.append("ulysses")
    return min(candidates, key=lambda each: sum(int(part.sum()) for part in bytes_sent(each, division, widths)))


def build(name: str, division: Division, axis: Axis, device: torch.device) -> Any:
    """An object with forward(q, k, v, scale) and backward(grad, saved, scale) for this rank."""
    first, _, second = name.partition("+")
    if first != "ulysses":
        return exchanges[first].build(division, axis.wire, device)
    if not second:
        return ulysses.build(division, (axis.wire, None), None, device)
    if axis.within is None or axis.between is None:
        raise UserError(f"parallel.exchange={name}: give parallel.node_size, a divisor of block_parallel_size")
    return ulysses.build(division, (axis.within, axis.between), exchanges[second].build, device)


def bytes_sent(
    name: str, division: Division, widths: Widths, node_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes every rank sends in one layer, forward and backward: two int64 [ranks]; exact."""
    first, _, second = name.partition("+")
    if first != "ulysses":
        return exchanges[first].bytes_sent(division, widths)
    size = division.ranks if node_size is None or not second else node_size
    forward, backward = ulysses.bytes_sent(division, widths, size)
    if second:
        heads = ulysses.Heads(widths.heads, widths.kv_heads, size)
        part = replace(widths, heads=widths.heads // size, kv_heads=heads.key[0].stop)
        more = exchanges[second].bytes_sent(division.joined(size), part)
        forward, backward = forward + np.repeat(more[0], size), backward + np.repeat(more[1], size)
    return forward, backward
