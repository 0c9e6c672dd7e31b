"""The forward passes of sampling: clean tokens go into a KV cache once, noisy ones look at it and leave no trace.

A block-causal clean row sees the clean rows up to its block's end, a noisy row the clean rows before its block and
its whole block. So a denoising step over one block is full attention over (cache, block), and so is the clean pass
that commits a finished block. Sliding layers cache their last window - 1 tokens (transformers' windowed cache), which
is what a noisy block sees in training too. Where the clean rows of a block do not all see the same (sliding layers, a
causal clean stream), a block is committed by a pass over the whole clean sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from unmask.attention import FULL, Plan
from unmask.models.check import layer_windows
from unmask.objectives import Decoding
from unmask.rows import IGNORE, Rows, Stream, assemble


class BlockCache(DynamicCache):
    """A DynamicCache that stores a pass's keys and values only while `storing`; else they are shown and dropped."""

    storing = True

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.storing:
            return super().update(key, value, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            return key, value
        return torch.cat([layer.keys, key], dim=-2), torch.cat([layer.values, value], dim=-2)


class Network:
    """A model as the samplers see it. `passes` counts forward passes.

    banned: bool [vocabulary], tokens that are never sampled; shift: row i predicts token i + 1.
    """

    def __init__(self, model: PreTrainedModel, decoding: Decoding, banned: Tensor):
        self.model = model
        self.decoding = decoding
        self.banned = banned.to(model.device)
        self.windows = tuple(dict.fromkeys(layer_windows(model)))
        self.passes = 0
        self.cache = BlockCache(config=model.config)

    def predict(self, token: Tensor, start: int, wanted: Tensor) -> Tensor:
        """Logits [len(wanted), vocabulary] of positions `wanted`: noisy tokens [start, len(token)) against the cache.

        With a shift the first position of the span is the business of the row before it: see `extend`.
        """
        rows = wanted - start - int(self.decoding.shift)
        return self._forward(token, start, FULL, rows, store=False)

    def extend(self, token: Tensor, start: int, block_size: int) -> Tensor:
        """Put the clean tokens [start, len(token)) into the cache; the logits [vocabulary] of the last row.

        The last row of a clean block equals the last row of a noisy block without a mask: with a shift it predicts
        the first token of the next block, as in training.
        """
        new = len(token) - start
        clean_size = 1 if self.decoding.causal else block_size
        seen_alike = new == 1 or (new <= clean_size and start % clean_size == 0 and self.windows == (None,))
        plan: Any = FULL
        if not seen_alike:
            self.cache, start = BlockCache(config=self.model.config), 0
            plan = Plan.from_rows(clean_rows(token, clean_size), windows=self.windows, device=self.model.device)
        last = torch.tensor([len(token) - start - 1])
        return self._forward(token, start, plan, last, store=True)[0]

    @torch.no_grad()
    def _forward(self, token: Tensor, start: int, plan: Any, rows: Tensor, *, store: bool) -> Tensor:
        device = self.model.device
        self.passes += 1
        self.cache.storing = store
        output = self.model(
            input_ids=token[None, start:].to(device),
            position_ids=torch.arange(start, len(token), device=device)[None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=rows.to(device),
            plan=plan,
        )
        logits = output.logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.masked_fill(self.banned, -torch.inf).cpu()


def clean_rows(token: Tensor, block_size: int) -> Rows:
    """The rows of one clean sequence: row i sees the tokens up to the end of its block (block size 1: causal)."""
    n = len(token)
    index = np.arange(n)
    stream = Stream(
        token=token.numpy(),
        position=index,
        lo=np.zeros(n, np.int64),
        hi=np.minimum((index // block_size + 1) * block_size, n),
        label=np.full(n, IGNORE),
        weight=np.zeros(n),
    )
    return assemble([(stream, None)], 0.0)
