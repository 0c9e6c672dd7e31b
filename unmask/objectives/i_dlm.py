"""I-DLM: every block all masked, next-token rows, and the autoregressive loss kept on the clean stream.

    loss = ( sum over noisy rows i of -log p(x_{i+1} | the masked block of i, clean before the block)
             + clean_loss * sum over clean rows i of -log p(x_{i+1} | x_0 .. x_i) )
           / number of supervised tokens but position 0

Clean rows are causal, so that the clean stream is the autoregressive model that a conversion starts from, and its loss
is that model's own. Both sums run over the same targets, every supervised token but position 0 once each, so that the
loss is mean + clean_loss * mean. There is no noise level: a block's supervised tokens are all masked. As in Fast-dLLM
v2 a noisy row predicts the token after it, across block edges too; prompt tokens in a block stay as they are.

Source: introspective diffusion language models (I-DLM). There noisy rows are causal inside their block too; here they
see all of it, which is what the block sampler gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from unmask.objectives.annealing import Annealed
from unmask.objectives.base import Decoding, needs_mask
from unmask.objectives.fast_dllm_v2 import FastDLLMv2Bound
from unmask.objectives.streams import Grid, clean_stream, following, noisy_stream, scored
from unmask.rows import Document, Rows, assemble


class IDLM(Annealed):
    """See the module. It has no noise: `draws` changes nothing."""

    #: Tokens in a block.
    block_size: int = Field(default=32, ge=1)
    #: Weight of the autoregressive loss on the clean rows; 0: they are context only.
    clean_loss: float = Field(default=0.2, ge=0)

    def unused(self) -> dict[str, str]:
        return {"draws": "an objective with noise"}

    @property
    def decoding(self) -> Decoding:
        return Decoding("block", self.block_size, True, causal=True)

    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        mask_token, streams, total = needs_mask(self), [], 0.0
        for document in documents:
            masked, target = document.supervised[None], following(document.supervised)
            token = np.where(masked, mask_token, document.token)
            label, weight = scored(document.token, masked, np.ones(masked.shape), shift=True)
            grid = Grid.over(target, self.block_size)
            noisy = noisy_stream(token, label, weight, grid, context=True, ahead=self.ahead)
            kept = (label[0], self.clean_loss * weight[0]) if self.clean_loss else (None, None)
            streams.append((clean_stream(document, 1, *kept), noisy))
            total += float(target.sum())
        return assemble(streams, total)

    def evaluation(self) -> IDLMBound:
        """See IDLMBound; the clean stream's own likelihood is that of the objective `ar`."""
        return IDLMBound(block_size=self.block_size, mask_token_id=self.mask_token_id)


class IDLMBound(FastDLLMv2Bound):
    """Fast-dLLM v2's bound of the model as the block sampler decodes it, on a causal clean stream.

    The first token of a block comes from the clean row before it, exactly; the rest from one noisy instance under
    exact-count noise. It is a bound of any model that is decoded so, also of one that was trained on blocks of masks
    alone, which has the most to lose where few tokens of a block are masked.
    """

    @property
    def clean_size(self) -> int:
        return 1

    @property
    def decoding(self) -> Decoding:
        return Decoding("block", self.block_size, True, causal=True)
