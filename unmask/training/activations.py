"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass.

`full` keeps the input of every decoder layer. `selective` also keeps what attention returned, so that neither attention
nor, on several ranks, its exchange runs twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def apply(model: Any, mode: str) -> None:
    """Switch checkpointing of a transformers model on: mode is `none`, `full` or `selective`."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def _keep_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operation == torch.ops.unmask.attend.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class MaskNoise:
    """Gaussian noise on the mask token's embedding, fading out over the first `steps` steps (LLaDA2, arXiv 2512.15745).

    The mask row of a converted AR model is close to zero and tells the layers little. At step s one vector
    N(0, (spread * (1 - s / steps))^2), a function of (seed, s) alone, is added to what the embedding returns for the
    mask token; the stored weight is not touched. spread: the standard deviation of the embedding's entries.
    """

    def __init__(self, embedding: nn.Embedding, mask_token_id: int, steps: int, seed: int):
        self.mask_token_id, self.steps, self.seed = mask_token_id, steps, seed
        self.spread = float(embedding.weight.detach().float().std())
        self.noise: torch.Tensor | None = None
        self._width = embedding.embedding_dim
        embedding.register_forward_hook(self._add)

    def at(self, step: int) -> None:
        """Draw the noise of `step`; from `steps` on there is none."""
        self.noise = None
        if step < self.steps:
            generator = torch.Generator().manual_seed((self.seed << 32) + step)
            self.noise = torch.randn(self._width, generator=generator) * self.spread * (1 - step / self.steps)

    def _add(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if self.noise is None or not module.training:
            return output
        masked = (args[0] == self.mask_token_id).unsqueeze(-1)
        return output + masked * self.noise.to(output)
