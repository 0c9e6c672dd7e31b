"""The two streams of a document, shared by every objective: its clean rows, and its noisy blocks.

clean row i        sees clean j < hi(i): hi = end of i's block (block-causal) or i + 1 (causal)
noisy row of a block that starts at s   sees clean j < s, and its whole block: never the clean copy of its block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unmask.rows import IGNORE, Document, Stream


@dataclass(frozen=True)
class Grid:
    """Blocks of `size` tokens counted from the document's start (the last may be shorter), and which are noised.

    start: first token of every token's block, int64 [n]; unit: which of the noised blocks a token lies in, int64 [n],
    -1 for none; units: how many there are; index: the tokens of noised blocks, int64 [m].
    """

    start: np.ndarray
    unit: np.ndarray
    units: int
    index: np.ndarray

    @classmethod
    def over(cls, wanted: np.ndarray, size: int | None) -> Grid:
        """Noised are the blocks that hold a token of `wanted`, bool [n]; without a size the document is one block."""
        length = len(wanted)
        size = size or max(length, 1)
        block = np.arange(length) // size
        noised = np.bincount(block[wanted], minlength=-(-length // size)) > 0
        unit = np.where(noised, np.cumsum(noised) - 1, -1)[block]
        return cls(start=block * size, unit=unit, units=int(noised.sum()), index=np.flatnonzero(unit >= 0))


def clean_stream(
    document: Document, size: int, label: np.ndarray | None = None, weight: np.ndarray | None = None
) -> Stream:
    """The document's clean rows, block-causal in blocks of `size` (1: causal)."""
    length = len(document)
    position = np.arange(length)
    return Stream(
        token=document.token,
        position=position,
        lo=np.zeros(length, np.int64),
        hi=np.minimum((position // size + 1) * size, length),
        label=np.full(length, IGNORE) if label is None else label,
        weight=np.zeros(length) if weight is None else weight,
    )


def noisy_stream(
    token: np.ndarray, label: np.ndarray, weight: np.ndarray, grid: Grid, context: bool, ahead: float = 1.0
) -> Stream | None:
    """The noised blocks of every view of a document; None when there is none.

    token, label, weight [views, n] over the document's tokens; context: whether blocks see the clean rows before them;
    ahead: the share of the later rows of its block that a row sees (see `annealing`).
    """
    index, views = grid.index, len(token)
    if not len(index):
        return None
    instance = grid.unit[index] + grid.units * np.arange(views)[:, None]
    zeros = np.zeros(views * len(index), np.int64)
    size = np.bincount(grid.unit[index])[grid.unit[index]]
    own = reach(index - grid.start[index], size, ahead)
    return Stream(
        token=token[:, index].ravel(),
        position=np.tile(index, views),
        lo=zeros,
        hi=np.tile(grid.start[index], views) if context else zeros,
        label=label[:, index].ravel(),
        weight=weight[:, index].ravel(),
        block=instance.ravel(),
        reach=np.tile(own, views),
    )


def reach(place: np.ndarray, size: np.ndarray, ahead: float) -> np.ndarray:
    """How many rows of its own block a row sees, int64 [n]: place of the row in it, rows of it, share of later ones."""
    return place + 1 + np.floor(ahead * (size - 1 - place) + 1e-9).astype(np.int64)


def scored(token: np.ndarray, mask: np.ndarray, weight: np.ndarray, shift: bool) -> tuple[np.ndarray, np.ndarray]:
    """(label, weight) of every row, [views, n]: a masked token's own row predicts it or, with shift, the row before.

    token int64 [n]; mask bool [views, n]; weight [views, n], that of the token where it is masked.
    """
    label = np.where(mask, token, IGNORE)
    weight = np.where(mask, weight, 0.0)
    if shift:
        label = np.pad(label[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)
        weight = np.pad(weight[:, 1:], ((0, 0), (0, 1)))
    return label, weight


def following(flag: np.ndarray) -> np.ndarray:
    """flag of the token after each one, bool [n]; False after the last."""
    return np.append(flag[1:], False)[: len(flag)]
