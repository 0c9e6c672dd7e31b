"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass.

`full` keeps the input of every decoder layer (a last layer that skips rows is kept whole: its backward comes first).
`selective` also keeps what attention returned: neither attention nor, on several ranks, its exchange runs twice.
`mlp` keeps everything of a layer but what lies inside of its MLP or experts, the widest part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unmask.engine.offload import Offload
from unmask.errors import UserError
from unmask.models.decoder import decoder_layers


def apply(model: Any, mode: str, offload: Offload | None = None) -> None:
    """Switch checkpointing of a transformers model on: mode is `none`, `full`, `selective` or `mlp`.

    offload: where `full` and `selective` put what they keep. UserError for `mlp` where the layers have no such part.
    """
    if mode == "none":
        return
    if mode == "mlp":
        for mlp in mlps(model):
            mlp.forward = partial(_again, mlp.forward)
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        keeping = partial(create_selective_checkpoint_contexts, _keep_attention)
        # torch's policies that offload do so in compiled layers only.
        options["context_fn"] = keeping if offload is None else offload.keeping(torch.ops.unmask.attend.default)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    if offload is None:
        return
    layers: list[Any] = decoder_layers(model)
    for each in layers:
        each._gradient_checkpointing_func = offload.around(each._gradient_checkpointing_func)


def mlps(model: Any) -> list[nn.Module]:
    """The MLP (or the experts) of every decoder layer; UserError where a layer has none that goes by that name."""
    found = [getattr(layer, "mlp", None) for layer in decoder_layers(model)]
    if not all(isinstance(each, nn.Module) for each in found):
        raise UserError(
            f"training.checkpointing=mlp: the layers of {type(model).__name__} have no part called mlp; "
            f"use full or selective"
        )
    return [each for each in found if each is not None]


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _keep_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operation == torch.ops.unmask.attend.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
