"""Gaussian noise on the mask token's embedding early in training (LLaDA2, Bie et al. 2512.15745).

The mask row of a converted AR model is close to zero and tells the layers little. At step s of the first S one vector

    N(0, (spread * (1 - s / S))^2),    a function of (seed, s) alone,

is added to what the embedding returns for the mask token; the stored weight is not touched.
"""

from __future__ import annotations

import torch
from torch import nn

from unmask.rows.random import EMBEDDING, generator


class MaskNoise:
    """Hooked onto an embedding; `spread` is the standard deviation of its entries at the start.

    LLaDA2 draws the noise anew for every masked token. Here a step's masked tokens share one vector, so that the loss
    depends neither on micro-batches nor on ranks.
    """

    def __init__(self, embedding: nn.Embedding, mask_token_id: int, steps: int, seed: int):
        self.mask_token_id, self.steps, self.seed = mask_token_id, steps, seed
        self.spread = float(embedding.weight.detach().float().std())
        self.noise: torch.Tensor | None = None
        self._width = embedding.weight.shape[1]
        embedding.register_forward_hook(self._add)

    def at(self, step: int) -> None:
        """Draw the noise of `step`; from `steps` on there is none."""
        self.noise = None
        if step < self.steps:
            unit = generator(self.seed, step, purpose=EMBEDDING).standard_normal(self._width)
            self.noise = torch.from_numpy(unit) * self.spread * (1 - step / self.steps)

    def _add(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if self.noise is None or not module.training:
            return output
        masked = (args[0] == self.mask_token_id).unsqueeze(-1)
        return output + masked * self.noise.to(output)
