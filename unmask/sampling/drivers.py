"""The three built-in samplers, one for each way a model is trained to decode.

block (BD3LM, SDAR, LLaDA2, Fast-dLLM v2): prefill whole clean blocks, denoise the current block against the cache,
commit it with one clean pass, go on. full (MDLM, LLaDA, Dream): every step sees the whole sequence. causal: AR.

A sampler is a generator: it yields the forward pass it needs and is sent the logits. So it is written down as if its
canvas were alone, and any number of canvases share their passes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling.canvas import Canvas
from unmask.sampling.choice import draw
from unmask.sampling.network import Clean, Noisy, Pass
from unmask.sampling.options import Options
from unmask.sampling.strategies import strategies

Steps = Generator[Pass, Tensor, None]

NONE = torch.empty(0, dtype=torch.int64)


def block(canvas: Canvas, decoding: Decoding, options: Options) -> Steps:
    """Block by block. The prompt's last, partial block is part of the first noisy one, its tokens fixed.

    With a shift the first token of a block has one source, the last clean row before the block: it is committed
    first, from the pass that filled the cache, and costs no pass of its own.
    """
    size = options.block_size or decoding.block_size
    if size is None:
        raise UserError("sample: block_size is needed for a model that was not trained with blocks")
    noise = torch.Generator().manual_seed(options.seed)
    cached, before = 0, None
    while not canvas.finished:
        start = canvas.first_open // size * size
        stop = min(start + size, len(canvas))
        if start > cached:
            before = yield Clean(cached, start, size, torch.tensor([start - 1]) if decoding.shift else NONE)
            cached = start
        if decoding.shift and canvas.open[start]:
            assert before is not None  # a canvas begins with a given token, see Session.canvas
            canvas.fill(torch.tensor([start]), draw(before, options, torch.rand(2, 1, generator=noise)).token.cpu())
        inside = options.sub_block_size or size
        for first in range(start, stop, inside):
            part = (first, min(first + inside, stop))
            yield from denoise(canvas, [Noisy(start, stop, NONE)], part, decoding, options, noise)
        canvas.done = stop


def full(canvas: Canvas, decoding: Decoding, options: Options) -> Steps:
    """Every step sees the whole sequence; `block_size` fills it from left to right, a block at a time."""
    noise = torch.Generator().manual_seed(options.seed)
    size = options.block_size or canvas.stop - canvas.start
    given = None if options.guidance == 0 else ~canvas.open
    for first in range(canvas.start, canvas.stop, size):
        part = (first, min(first + size, canvas.stop))
        yield from denoise(canvas, [Noisy(0, len(canvas), NONE)], part, decoding, options, noise, given)
        canvas.done = part[1]


def causal(canvas: Canvas, decoding: Decoding, options: Options) -> Steps:
    """Token by token, left to right."""
    if canvas.stop < len(canvas) or len(canvas.holes) > 1:
        raise UserError("sample: an autoregressive model cannot see a suffix; leave it out")
    noise = torch.Generator().manual_seed(options.seed)
    cached = 0
    while not canvas.finished:
        position = canvas.first_open
        logits = yield Clean(cached, position, 1, torch.tensor([position - 1]))
        cached = position
        token = draw(logits, options, torch.rand(2, 1, generator=noise)).token.cpu()
        canvas.fill(torch.tensor([position]), token)
        canvas.done = position + 1


def denoise(
    canvas: Canvas,
    passes: Sequence[Noisy],
    part: tuple[int, int],
    decoding: Decoding,
    options: Options,
    noise: torch.Generator,
    given: Tensor | None = None,
) -> Steps:
    """Fill the open positions of `part` (start, stop). passes: of the first step, the second, ..., the last of all that
    follow, each over rows that hold it. given: bool [canvas], of guidance: the prompt, masked in the second pass."""
    strategy, size = strategies[options.strategy], part[1] - part[0]
    step = 0
    while not canvas.finished and len(wanted := canvas.wanted(*part)):
        one = replace(passes[min(step, len(passes) - 1)], rows=wanted - int(decoding.shift))
        logits = yield one
        if given is not None:
            # An open position holds the mask token.
            masked = canvas.token.masked_fill(given, int(canvas.token[wanted[0]]))
            without = yield replace(one, token=masked)
            guided = without + (options.guidance + 1) * (logits - without)
            logits = guided.masked_fill(logits == -torch.inf, -torch.inf)
        uniform = torch.rand(2, len(wanted), generator=noise)
        candidates = draw(logits, options, uniform)
        quota = _quota(options, step, size, uniform[1])
        chosen = strategy(candidates, quota, options)
        if quota and not len(chosen):
            raise UserError(f"sample: strategy={options.strategy} commits nothing, so that sampling would never end")
        if len(chosen):
            canvas.fill(wanted[chosen.cpu()], candidates.token[chosen].cpu())
        step += 1


def _quota(options: Options, step: int, size: int, order: Tensor) -> int:
    """How many tokens a step commits, at least; order: [open], random numbers. The last step takes all that is open.

    Dream: t falls evenly from 1 to 1e-3 over the steps; a step from t to s uncovers a mask with probability 1 - s/t.
    """
    steps, left = options.steps or size, len(order)
    if options.schedule == "fixed":
        return size // steps + (step < size % steps) if step < steps else left
    if options.schedule == "even" or step >= steps - 1:
        return -(-left // max(1, steps - step))
    t = 1 - (1 - 1e-3) * step / steps
    stay = (t - (1 - 1e-3) / steps) / t
    if options.schedule == "timesteps":
        return int(left * (1 - stay))
    return int((order > stay).sum())
