"""Who sees whom, pair by pair, from a description of a pack that knows nothing of Rows; and random such packs.

Every row carries a token of its own, so that sets of tokens name rows whatever order `assemble` puts them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from unmask.rows import IGNORE, Rows, Stream, assemble


@dataclass
class Row:
    """One row: the clean indices [lo, hi) of its document, and how many rows of its own block it sees."""

    token: int
    lo: int
    hi: int
    labelled: bool
    reach: int = 0


@dataclass
class Described:
    """One document: clean rows, and noisy blocks whose rows end their context at the same `hi`."""

    clean: list[Row]
    blocks: list[list[Row]]


def seen(documents: list[Described], window: int | None = None) -> dict[int, set[int]]:
    """{token of a row: tokens of the rows it attends}, by the rule of DESIGN.md, one pair at a time."""
    sees: dict[int, set[int]] = {}
    for document in documents:
        for i, row in enumerate(document.clean):
            oldest = 0 if window is None else i - (window - 1)
            sees[row.token] = {
                other.token for j, other in enumerate(document.clean) if row.lo <= j < row.hi and j >= oldest
            }
        for block in document.blocks:
            for row in block:
                oldest = 0 if window is None else row.hi - (window - 1)
                context = {
                    other.token for j, other in enumerate(document.clean) if row.lo <= j < row.hi and j >= oldest
                }
                sees[row.token] = context | {other.token for other in block[: row.reach]}
    return sees


def attended(rows: Rows, mask: np.ndarray) -> dict[int, set[int]]:
    """A mask [N, N] over `rows` as `seen` writes it."""
    return {int(token): set(rows.token[mask[r]].tolist()) for r, token in enumerate(rows.token)}


def pair_mask(rows: Rows, window: int | None = None) -> np.ndarray:
    """bool [N, N] from the fields of Rows, one pair at a time: for tests that start from Rows."""
    n, clean = len(rows), int((rows.block < 0).sum())
    mask = np.zeros((n, n), bool)
    first = {int(b): int(np.argmax(rows.block == b)) for b in set(rows.block.tolist())}
    for r in range(n):
        start = r if r < clean else int(rows.hi[r])
        for c in range(n):
            if c < clean:
                mask[r, c] = rows.lo[r] <= c < rows.hi[r] and (window is None or c > start - window)
            elif rows.block[c] == rows.block[r]:
                mask[r, c] = c - first[int(rows.block[r])] < rows.reach[r]
    return mask


def built(documents: list[Described], count: float = 1.0) -> Rows:
    """The described pack through Stream and assemble."""
    streams = []
    for document in documents:
        noisy = [(row, number) for number, block in enumerate(document.blocks) for row in block]
        streams.append(
            (
                _stream(document.clean) if document.clean else None,
                _stream([row for row, _ in noisy], [number for _, number in noisy]) if noisy else None,
            )
        )
    return assemble(streams, count)


def _stream(rows: list[Row], block: list[int] | None = None) -> Stream:
    def column(values: list[Any]) -> np.ndarray:
        return np.array(values, np.int64)

    token = column([row.token for row in rows])
    return Stream(
        token=token,
        position=token % 7,
        lo=column([row.lo for row in rows]),
        hi=column([row.hi for row in rows]),
        label=np.where([row.labelled for row in rows], token + 1, IGNORE),
        weight=np.where([row.labelled for row in rows], 1.0, 0.0),
        block=None if block is None else column(block),
        reach=None if block is None else column([row.reach for row in rows]),
        columns={"half": (token / 2).astype(np.float32), "pair": np.stack([token, -token], 1)},
    )


def columns_follow(rows: Rows) -> bool:
    """Whether each row has the columns that `built` gives a row of its token."""
    token = rows.token.tolist()
    wanted = {"half": [t / 2 for t in token], "pair": [[t, -t] for t in token]}
    return not token or {name: column.tolist() for name, column in rows.columns.items()} == wanted


@st.composite
def packs(draw: Any, largest: int = 12, documents: int = 3, views: int = 2) -> list[Described]:
    """Documents with causal, block-causal or arbitrary clean rows; blocks on a grid, at anchors, or without context.

    Blocks come in up to `views` copies, bidirectional, causal, or with any reach (0 included).
    """
    names = iter(range(10**6))
    pack = []
    for _ in range(draw(st.integers(1, documents))):
        length, size = draw(st.integers(0, largest)), draw(st.integers(1, largest))
        kind = draw(st.sampled_from(["causal", "block-causal", "any"]))
        clean = []
        for i in range(length):
            lo, hi = 0, i + 1 if kind == "causal" else min((i // size + 1) * size, length)
            if kind == "any":
                lo, hi = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
            clean.append(Row(next(names), lo, hi, draw(st.booleans())))
        layout = draw(st.sampled_from(["none", "grid", "anchors", "whole"]))
        if layout == "grid":
            spans = [(start, min(size, length - start)) for start in range(0, length, size)]
        elif layout == "anchors":
            spans = [(draw(st.integers(0, length)), size) for _ in range(draw(st.integers(0, 4)))]
        else:
            spans = [(0, size)] if layout == "whole" else []
        blocks = []
        for start, n in spans * draw(st.integers(1, views)):
            lo = draw(st.integers(0, start)) if draw(st.booleans()) else 0
            reach = draw(st.sampled_from(["all", "causal", "any"]))
            ends = {"all": [n] * n, "causal": list(range(1, n + 1))}.get(reach) or [
                draw(st.integers(0, n)) for _ in range(n)
            ]
            blocks.append([Row(next(names), lo, start, draw(st.booleans()), end) for end in ends])
        pack.append(Described(clean, blocks))
    return pack


WINDOWS = st.none() | st.integers(1, 9)
