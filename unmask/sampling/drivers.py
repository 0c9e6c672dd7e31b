"""The three built-in samplers, one for each way a model is trained to decode.

block (BD3LM, SDAR, LLaDA2, Fast-dLLM v2): prefill whole clean blocks, denoise the current block against the cache,
commit it with one clean pass, go on. full (MDLM, LLaDA, Dream): every step sees the whole sequence. causal: AR.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unmask.errors import UserError
from unmask.sampling.canvas import Canvas
from unmask.sampling.choice import confident, draw
from unmask.sampling.network import Network
from unmask.sampling.options import Options

#: Called after every change of the canvas.
Report = Callable[[Canvas], None]


def block(network: Network, canvas: Canvas, options: Options, report: Report) -> None:
    """Block by block. The prompt's last, partial block is part of the first noisy one, its tokens fixed.

    With a shift the first token of a block has one source, the last clean row before the block: it is committed
    first, from the pass that filled the cache, and costs no pass of its own.
    """
    size = options.block_size or network.decoding.block_size
    if size is None:
        raise UserError("sample: block_size is needed for a model that was not trained with blocks")
    noise = torch.Generator().manual_seed(options.seed)
    start = canvas.start // size * size
    before = network.extend(canvas.token[:start], 0, size) if start else None
    while True:
        stop = min(start + size, len(canvas))
        if network.decoding.shift and canvas.open[start]:
            first, _ = draw(_known(before)[None], options, torch.rand(1, generator=noise))
            canvas.fill(torch.tensor([start]), first)
            report(canvas)
        _denoise(network, canvas, (start, stop), (start, stop), options, noise, report)
        if canvas.finished:
            return
        before = network.extend(canvas.token[:stop], start, size)
        start = stop


def full(network: Network, canvas: Canvas, options: Options, report: Report) -> None:
    """Every step sees the whole sequence; `block_size` fills it from left to right, a block at a time."""
    if network.decoding.shift and canvas.open[0]:
        raise UserError("sample: the prompt is empty, and this model predicts a token from the one before it")
    noise = torch.Generator().manual_seed(options.seed)
    size = options.block_size or canvas.stop - canvas.start
    for first in range(canvas.start, canvas.stop, size):
        part = (first, min(first + size, canvas.stop))
        _denoise(network, canvas, (0, len(canvas)), part, options, noise, report)


def causal(network: Network, canvas: Canvas, options: Options, report: Report) -> None:
    """Token by token, left to right."""
    if canvas.start == 0:
        raise UserError("sample: the prompt is empty, and an autoregressive model needs a first token")
    if canvas.suffix:
        raise UserError("sample: an autoregressive model cannot see a suffix; leave it out")
    noise = torch.Generator().manual_seed(options.seed)
    logits = network.extend(canvas.token[: canvas.start], 0, 1)
    for position in range(canvas.start, canvas.stop):
        token, _ = draw(logits[None], options, torch.rand(1, generator=noise))
        canvas.fill(torch.tensor([position]), token)
        report(canvas)
        if canvas.finished:
            return
        logits = network.extend(canvas.token[: position + 1], position, 1)


def _denoise(
    network: Network,
    canvas: Canvas,
    seen: tuple[int, int],
    part: tuple[int, int],
    options: Options,
    noise: torch.Generator,
    report: Report,
) -> None:
    """Fill the open positions of `part`; the noisy rows are `seen`, which holds it. Both are (start, stop)."""
    step = 0
    while not canvas.finished and len(wanted := canvas.wanted(*part)):
        logits = network.predict(canvas.token[: seen[1]], seen[0], wanted)
        token, confidence = draw(logits, options, torch.rand(len(wanted), generator=noise))
        at_least = 1 if options.steps is None else -(-len(wanted) // max(1, options.steps - step))
        chosen = confident(confidence, options.threshold, at_least)
        canvas.fill(wanted[chosen], token[chosen])
        report(canvas)
        step += 1


def _known(logits: torch.Tensor | None) -> torch.Tensor:
    if logits is None:
        raise UserError("sample: the prompt is empty, and this model predicts a token from the one before it")
    return logits
