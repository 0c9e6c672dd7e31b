"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass.

`full` keeps the input of every decoder layer (a last layer that skips rows is kept whole: its backward comes first).
`selective` also keeps what attention returned: neither attention nor, on several ranks, its exchange runs twice.
`mlp` keeps everything but what is inside of MLPs and experts, and repeats these alone, which a schedule can do that
walks through a backward pass twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unmask.errors import UserError
from unmask.models.check import decoder_layers


def apply(model: Any, mode: str) -> None:
    """Switch checkpointing of a transformers model on: mode is `none`, `full`, `selective` or `mlp`.

    UserError for `mlp` where a layer has none.
    """
    if mode == "none":
        return
    if mode == "mlp":
        for number, layer in enumerate(decoder_layers(model)):
            mlp: Any = getattr(layer, "mlp", None)
            if mlp is None:
                kind = type(layer).__name__
                raise UserError(f"training.checkpointing=mlp: layer {number} ({kind}) has no mlp; use none or full")
            mlp.forward = partial(_again, mlp, mlp.forward)
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def _again(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a module, which keeps its input only and runs once more in backward."""
    if not module.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _keep_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operation == torch.ops.unmask.attend.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
