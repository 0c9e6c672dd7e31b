"""The forward passes of sampling: clean tokens go into a KV cache once, noisy ones look at it and leave no trace there.

A block-causal clean row sees the clean rows up to its block's end, a noisy row the clean rows before its block and
its whole block: as in training (see `cache`). Rows of any number of sequences share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.models.decoder import spec_of
from unmask.models.logits import Logits, Query
from unmask.objectives import Decoding
from unmask.sampling.cache import Cache, Reads, Segment
from unmask.sampling.canvas import Canvas

#: Rows that go through the model at once, unless one sequence alone has more.
ROWS = 8192


@dataclass(frozen=True)
class Noisy:
    """A pass over tokens [start, stop) as one noisy block, the clean tokens before `start` being in the cache.

    rows: int64 [n], positions in [start, stop) whose logits are wanted. signal: of a model that conditions itself, the
    logits [stop - start, vocabulary] of the step before. sees: one past the last cached token that the rows see, where
    that is not `stop`; keep: later passes see what this one has left in the cache. token: int64 [stop - start], not
    the canvas's.
    """

    start: int
    stop: int
    rows: Tensor
    signal: Tensor | None = None
    sees: int | None = None
    keep: bool = False
    token: Tensor | None = None


@dataclass(frozen=True)
class Clean:
    """A pass that puts tokens [start, stop) into the cache, those before `start` being there: whole blocks of `size`.

    rows: as of Noisy. With a shift, the last row of a clean block equals the last row of a noisy block without a
    mask: it predicts the first token of the next block.
    """

    start: int
    stop: int
    size: int
    rows: Tensor


#: What a sampler asks for: the network answers each pass with logits [len(rows), vocabulary].
Pass = Noisy | Clean


class Network:
    """A model, and the cache of the canvases that are sampled together. `passes` counts forward passes, `taken` those
    that each canvas had rows in.

    cached: keep the clean tokens' keys and values; else they are computed again for every pass that sees them.
    """

    def __init__(self, model: Logits, decoding: Decoding, canvases: Sequence[Canvas], *, cached: bool = True):
        self.model, self.decoding, self.canvases, self.cached = model, decoding, canvases, cached
        self.windows = tuple(dict.fromkeys(spec_of(model.model).windows))
        self.cache = Cache([len(canvas) for canvas in canvases])
        self.sizes = [1] * len(canvases)
        self.passes = 0
        self.taken = [0] * len(canvases)

    def run(self, asked: dict[int, Pass]) -> dict[int, Tensor]:
        """Logits [n, vocabulary], at least fp32, on the model's device, of what each canvas (by number) asks for."""
        answers: dict[int, Tensor] = {}
        group: list[tuple[int, Pass, list[Segment]]] = []
        size = 0
        for number, one in asked.items():
            segments = self._segments(number, one)
            rows = sum(map(len, segments))
            if group and size + rows > ROWS:
                answers |= self._forward(group)
                group, size = [], 0
            group.append((number, one, segments))
            size += rows
        return answers | self._forward(group)

    def _segments(self, number: int, one: Pass) -> list[Segment]:
        """The rows that answer a pass, the one's own last."""
        if isinstance(one, Noisy):
            own = Segment(number, one.start, one.stop, 0, one.sees)
            again = [] if self.cached or not one.start else [Segment(number, 0, one.start, self.sizes[number])]
            return [*again, own]
        self.sizes[number] = 1 if self.decoding.causal else one.size
        if self.cached:
            return [Segment(number, one.start, one.stop, self.sizes[number])]
        return [Segment(number, 0, one.stop, self.sizes[number])] if len(one.rows) else []

    @torch.no_grad()
    def _forward(self, group: Sequence[tuple[int, Pass, list[Segment]]]) -> dict[int, Tensor]:
        """One forward pass over the segments of all."""
        packed = [segment for _, _, segments in group for segment in segments]
        if not packed:
            return {number: torch.empty(0) for number, _, _ in group}
        rows, first = [], 0
        for number, one, segments in group:
            self.taken[number] += bool(segments)
            first += sum(map(len, segments))
            # The rows that are wanted are among the last segment's, which ends here.
            rows.append(one.rows - one.stop + first)
        device = self.model.device
        token = torch.cat([self._token(one, s) for _, one, segments in group for s in segments])
        position = torch.cat([torch.arange(s.start, s.stop) for s in packed])
        self.passes += 1
        keep = self.cached and any(
            one.keep or one.start > 0 if isinstance(one, Noisy) else True for _, one, segments in group if segments
        )
        plan = Reads(self.cache, packed, self.windows, device, keep)
        places = token[None].to(device), position[None].to(device), torch.cat(rows).to(device)
        logits = self.model(Query(*places, plan, *self._conditioned(group)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts = logits.split([len(wanted) for wanted in rows])
        return {number: part for (number, _, _), part in zip(group, parts, strict=True)}

    def _token(self, one: Pass, segment: Segment) -> Tensor:
        """What a segment's rows hold; a pass's own tokens belong to its own segment, not to those before it."""
        if isinstance(one, Noisy) and one.token is not None and segment.clean == 0:
            return one.token
        return self.canvases[segment.sequence].token[segment.start : segment.stop]

    def _conditioned(self, group: Sequence[tuple[int, Pass, list[Segment]]]) -> tuple[Any, ...]:
        """(rows of canvases, what they are conditioned on), as of a Query; nothing for a model that has none."""
        if not getattr(self.model.model.base_model, "self_conditions", False):
            return ()
        canvas, before, first = [], [], 0
        for _, one, segments in group:
            first += sum(map(len, segments))
            if isinstance(one, Noisy):
                canvas.append(torch.arange(first - len(segments[-1]), first))
                before.append((one.signal, len(segments[-1])))
        return (torch.cat(canvas).to(self.model.device), tuple(before)) if canvas else ()
