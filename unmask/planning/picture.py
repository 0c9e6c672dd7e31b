"""Who owns what: a placed pack drawn in text, rows by rank (`unmask inspect --placement`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from unmask.blocks.axis import Layers, Placed, sent, work
from unmask.blocks.exchange import resolve
from unmask.errors import counted
from unmask.rows import pairs

#: A cell of the picture by the share of its rows that a rank holds.
SHADES = " ░▒▓█"


def facts(placed: Placed, layers: Layers, exchange: str, node_size: int | None = None) -> dict[str, Any]:
    """What every rank has to do for the pack, in lists by rank: rows, pairs of a full layer, share of the mean work,
    and bytes sent forward and backward."""
    local = [placed.local(rank) for rank in range(placed.ranks)]
    attended = [pairs(rows).sum() if placed.placement.SHARED == "none" else None for _, rows in local]
    every = pairs(placed.rows)
    flops = work(placed, layers)
    forward, backward = sent(placed, layers, exchange, node_size)
    return {
        "placement": placed.name,
        "exchange": _exchanges(placed, layers, exchange),
        "rank_rows": [len(index) for index, _ in local],
        "rank_pairs": [
            int(every[index].sum() if own is None else own) for (index, _), own in zip(local, attended, strict=True)
        ],
        "rank_work": [round(float(share), 4) for share in flops / max(flops.mean(), 1.0)],
        "rank_bytes_forward": forward.tolist(),
        "rank_bytes_backward": backward.tolist(),
    }


def _exchanges(placed: Placed, layers: Layers, exchange: str) -> str:
    """The exchange of every kind of layer, as `auto` chose it."""
    if placed.placement.SHARED == "none":
        return "none"
    names = [resolve(exchange, placed.division(*kind), layers.widths[kind[0]]) for kind in dict.fromkeys(layers.kinds)]
    return ", ".join(dict.fromkeys(names))


def picture(placed: Placed, found: dict[str, Any], width: int = 48) -> str:
    """The pack's clean rows and noisy rows from left to right, a line for each rank, darker where it holds more."""
    rows, clean = placed.rows, placed.rows.clean
    noisy = len(rows) - clean
    left = max(1, min(width, round(2 * width * clean / max(1, len(rows)))))
    right = max(1, 2 * width - left)
    lines = [
        f"{placed.name}, {found['exchange']}: {counted(clean, 'clean row')}, {counted(noisy, 'noisy row')} of "
        f"{counted(len(rows.blocks()[0]), 'block')}, {counted(len(np.unique(rows.document)), 'document')}",
        f"{'rank':>4}  {'clean':<{left}} {'noisy':<{right}} {'rows':>8} {'pairs':>13} {'work':>6} {'sends':>10}",
    ]
    for rank in range(placed.ranks):
        index, _ = placed.local(rank)
        held = np.bincount(index, minlength=len(rows)) > 0
        bytes_ = found["rank_bytes_forward"][rank] + found["rank_bytes_backward"][rank]
        lines.append(
            f"{rank:>4}  {_strip(held[:clean], left)} {_strip(held[clean:], right)} {found['rank_rows'][rank]:>8,} "
            f"{found['rank_pairs'][rank]:>13,} {found['rank_work'][rank]:>6.3f} {bytes_ / 2**20:>7.2f} MB"
        )
    return "\n".join(lines)


def _strip(held: np.ndarray, width: int) -> str:
    if len(held) == 0:
        return " " * width
    edges = np.linspace(0, len(held), width + 1).astype(int)
    shares = [held[a : max(b, a + 1)].mean() for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return "".join(SHADES[int(np.ceil(share * (len(SHADES) - 1)))] for share in shares)
