"""Approximate caches for models that see the whole sequence: Fast-dLLM v1, Wu 2505.22618, section 3.2.

A block's first step runs the whole sequence and keeps every key and value. Its further steps reuse them though the
block has changed since, so that the text may differ from that of `full`:

    prefix_cache    rows from the block's start to the end run again; what is before the block is reused
    dual_cache      the block's rows alone run again, and replace theirs; what is before and after it is reused
"""

from __future__ import annotations

import torch

from unmask.objectives import Decoding
from unmask.sampling.canvas import Canvas
from unmask.sampling.drivers import NONE, Steps, denoise
from unmask.sampling.network import Noisy
from unmask.sampling.options import Options


def prefix_cache(canvas: Canvas, decoding: Decoding, options: Options) -> Steps:
    """Reuse what is before the block."""
    return _sampler(canvas, decoding, options, suffix=False)


def dual_cache(canvas: Canvas, decoding: Decoding, options: Options) -> Steps:
    """Reuse what is before and after the block."""
    return _sampler(canvas, decoding, options, suffix=True)


def _sampler(canvas: Canvas, decoding: Decoding, options: Options, suffix: bool) -> Steps:
    noise = torch.Generator().manual_seed(options.seed)
    size, whole = options.block_size or canvas.stop - canvas.start, len(canvas)
    for first in range(canvas.start, canvas.stop, size):
        stop = min(first + size, canvas.stop)
        again = Noisy(first, stop, NONE, sees=whole, keep=True) if suffix else Noisy(first, whole, NONE)
        passes = (Noisy(0, whole, NONE, keep=True), again)
        yield from denoise(canvas, passes, (first, stop), decoding, options, noise)
        canvas.done = stop
