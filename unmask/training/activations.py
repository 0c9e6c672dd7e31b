"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass.

`full` keeps the input of every decoder layer (a last layer that skips rows is kept whole: its backward comes first).
`selective` also keeps what attention returned: neither attention nor, on several ranks, its exchange runs twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


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
