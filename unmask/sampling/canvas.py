"""The sequence being sampled: given tokens, and holes whose open positions still hold the mask token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import UserError

HOLE = re.compile(r"\[MASK:(\d+)\]")


@dataclass
class Canvas:
    """token: int64 [n], the mask token where `open`; open: bool [n]; holes: their [start, stop), in order.

    `ends` are the tokens that end a generation (none: infilling, which nothing ends). `dropped` counts prompt tokens
    left out at the front to move the block grid, `steps` the changes made so far. What is below `done` is final: a
    sampler moves it as it finishes its blocks.
    """

    token: Tensor
    open: Tensor
    holes: Sequence[tuple[int, int]]
    ends: frozenset[int] = frozenset()
    dropped: int = 0
    steps: int = 0
    done: int = 0

    def __len__(self) -> int:
        return len(self.token)

    @property
    def start(self) -> int:
        """Where the first hole begins."""
        return self.holes[0][0]

    @property
    def stop(self) -> int:
        """Where the last hole ends."""
        return self.holes[-1][1]

    def lengthen(self, size: int) -> None:
        """Room after the last hole for all of the blocks of `size` that begin in it."""
        short = -(self.stop - self.start) % size
        self.token = torch.cat([self.token, self.token.new_zeros(short)])
        self.open = torch.cat([self.open, self.open.new_zeros(short)])

    @property
    def first_open(self) -> int:
        """The first open position; `stop` where there is none."""
        found = torch.nonzero(self.open[: self.stop])
        return int(found[0]) if len(found) else self.stop

    def wanted(self, start: int, stop: int) -> Tensor:
        """Open positions in [start, stop), int64."""
        return torch.nonzero(self.open[start:stop]).flatten() + start

    def fill(self, index: Tensor, token: Tensor) -> None:
        self.token[index] = token
        self.open[index] = False
        self.steps += 1

    @property
    def end(self) -> int:
        """One past the last token of the answer: the first committed end token, else `stop`."""
        if not self.ends:
            return self.stop
        ends = torch.isin(self.token[self.start : self.stop], torch.tensor(sorted(self.ends)))
        ends &= ~self.open[self.start : self.stop]
        return self.start + int(torch.nonzero(ends)[0]) if ends.any() else self.stop

    @property
    def finished(self) -> bool:
        """No open position is left before the end."""
        return not bool(self.open[self.start : self.end].any())

    def answer(self, hole: int = 0, upto: int | None = None) -> list[int]:
        """The committed tokens of a hole, up to its first open position (and below `upto`)."""
        start, stop = self.holes[hole]
        stop = min(stop, self.end, stop if upto is None else upto)
        gaps = torch.nonzero(self.open[start:stop])
        return self.token[start : start + int(gaps[0]) if len(gaps) else stop].tolist()


@dataclass(frozen=True)
class Fill:
    """Given texts (or token ids) with holes between them: parts[0], holes[0] tokens to fill, parts[1], ..."""

    parts: tuple[str | Sequence[int], ...]
    holes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.holes or len(self.parts) != len(self.holes) + 1:
            raise UserError(f"fill: {len(self.holes)} holes lie between {len(self.holes) + 1} parts; give at least one")
        if min(self.holes) < 1:
            raise UserError("fill: a hole has at least one token, as in [MASK:20]")

    @classmethod
    def parse(cls, text: str) -> Fill:
        """From "def f(x):[MASK:20]return y": a hole of 20 tokens between two texts."""
        parts = HOLE.split(text)
        if len(parts) == 1:
            raise UserError(f"fill: {_short(text)!r} has no hole; write [MASK:20] where 20 tokens are to be filled in")
        return cls(tuple(parts[::2]), tuple(map(int, parts[1::2])))


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def continuation(token: Sequence[int], length: int, mask: int, *, ends: frozenset[int] = frozenset()) -> Canvas:
    """A prompt followed by `length` masks. As in training, the last block may be shorter than the others."""
    start, stop = len(token), len(token) + length
    tokens = torch.tensor([*token, *[mask] * length], dtype=torch.int64)
    return Canvas(tokens, torch.arange(stop) >= start, [(start, stop)], ends)


def infill(
    parts: Sequence[Sequence[int]], holes: Sequence[int], mask: int, *, block_size: int = 1, kept: int = 0
) -> Canvas:
    """parts[0] + holes[0] masks + parts[1] + ..., cut at the front so that the holes' blocks hold much of what follows.

    Without blocks (block_size 1) nothing is cut. With them, a hole sees to its right only what shares its block, so the
    grid is moved by dropping the first few tokens of parts[0] (at most half of them): first to spread the holes
    over the fewest blocks, then to have the most given tokens after them in their last blocks, then to drop the least.
    kept: so many tokens at the very front stay, what texts begin with.
    """

    def cost(drop: int) -> tuple[int, int, int]:
        blocks, visible, start = 0, 0, len(parts[0]) - drop
        for hole, after in zip(holes, parts[1:], strict=True):
            stop = start + hole
            blocks += -(-stop // block_size) - start // block_size
            visible += min(len(after), -stop % block_size)
            start = stop + len(after)
        return blocks, -visible, drop

    dropped = min(range(min(block_size - 1, (len(parts[0]) - kept) // 2) + 1), key=cost)
    tokens, open_ = [*parts[0][:kept], *parts[0][kept + dropped :]], [False] * (len(parts[0]) - dropped)
    spans = []
    for hole, after in zip(holes, parts[1:], strict=True):
        spans.append((len(tokens), len(tokens) + hole))
        tokens += [*[mask] * hole, *after]
        open_ += [*[True] * hole, *[False] * len(after)]
    return Canvas(torch.tensor(tokens, dtype=torch.int64), torch.tensor(open_), spans, dropped=dropped)
