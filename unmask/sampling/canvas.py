"""The sequence being sampled: known tokens, and open positions that still hold the mask token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Canvas:
    """token: int64 [n], the mask token where `open`; open: bool [n]. Positions [start, stop) are wanted.

    `eos` ends a generation; None (infilling) never does.
    `dropped` counts prompt tokens left out at the front to move the block grid, `suffix` the tokens after a hole,
    `steps` the changes made so far.
    """

    token: Tensor
    open: Tensor
    start: int
    stop: int
    eos: int | None = None
    dropped: int = 0
    suffix: int = 0
    steps: int = 0

    def __len__(self) -> int:
        return len(self.token)

    def wanted(self, start: int, stop: int) -> Tensor:
        """Open positions in [start, stop), int64."""
        return torch.nonzero(self.open[start:stop]).flatten() + start

    def fill(self, index: Tensor, token: Tensor) -> None:
        self.token[index] = token
        self.open[index] = False
        self.steps += 1

    @property
    def end(self) -> int:
        """One past the last token of the answer: the first committed EOS, else `stop`."""
        if self.eos is None:
            return self.stop
        ends = (self.token[self.start : self.stop] == self.eos) & ~self.open[self.start : self.stop]
        return self.start + int(torch.nonzero(ends)[0]) if ends.any() else self.stop

    @property
    def finished(self) -> bool:
        """No open position is left before the end."""
        return not bool(self.open[self.start : self.end].any())

    def answer(self) -> list[int]:
        """The committed tokens of the answer, up to the first open position."""
        end = self.end
        gaps = torch.nonzero(self.open[self.start : end])
        return self.token[self.start : self.start + int(gaps[0]) if len(gaps) else end].tolist()


def continuation(token: Sequence[int], length: int, mask: int, *, eos: int | None) -> Canvas:
    """A prompt followed by `length` masks. As in training, the last block may be shorter than the others."""
    start, stop = len(token), len(token) + length
    tokens = torch.tensor([*token, *[mask] * length], dtype=torch.int64)
    return Canvas(tokens, torch.arange(stop) >= start, start, stop, eos)


def infill(prefix: Sequence[int], hole: int, suffix: Sequence[int], mask: int, *, block_size: int = 1) -> Canvas:
    """prefix + `hole` masks + suffix, cut at the front so that the hole's last block holds much of the suffix.

    Without blocks (block_size 1) nothing is cut. With them, a hole sees to its right only what shares its block, so
    the grid is moved by dropping the first few tokens of the prefix (at most half of it): first to spread the hole
    over the fewest blocks, then to have the most suffix in its last block, then to drop the least.
    """
    dropped = 0
    if block_size > 1:

        def cost(drop: int) -> tuple[int, int, int]:
            first = (len(prefix) - drop) % block_size
            visible = min(len(suffix), -(first + hole) % block_size)
            return -(-(first + hole) // block_size), -visible, drop

        dropped = min(range(min(block_size - 1, len(prefix) // 2) + 1), key=cost)
    kept = list(prefix)[dropped:]
    tokens = torch.tensor([*kept, *[mask] * hole, *suffix], dtype=torch.int64)
    position = torch.arange(len(tokens))
    start, stop = len(kept), len(kept) + hole
    return Canvas(tokens, (position >= start) & (position < stop), start, stop, None, dropped, len(suffix))
