"""The door transformers' models come in by: attn_implementation="unmask", and the plan as a keyword.

Registered with AttentionInterface (what a layer calls) and AttentionMaskInterface (no mask tensor is ever built: the
plan is the mask). A forward without a plan is an error, never a silent change of what attends to what.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unmask.attention.attend import attend
from unmask.attention.plan import Plan

NAME = "unmask"


class MissingPlan(RuntimeError):
    """A layer asked for attention, and no plan had come with the call."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim] -> [1, rows, heads, head_dim], as AttentionInterface functions return it."""
    plan = kwargs.get("plan")
    if plan is None:
        raise MissingPlan(
            'attn_implementation="unmask" needs a plan: model(..., plan=Plan.from_rows(rows)); '
            'for plain use load the model with attn_implementation="sdpa"'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = _one_dtype(query, key, value)
    window = kwargs.get("sliding_window")
    if isinstance(plan, Plan):
        out, _ = attend(query, key, value, plan.handle(window), scale)
        return out.transpose(1, 2), None
    return plan.attend(module, query, key, value, scale, window)  # a probe: see models.decoder


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast norms and rotary leave q and k in fp32 and v in half precision: agree on autocast's dtype."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def register() -> None:
    """Make attn_implementation="unmask" known to transformers; harmless to repeat."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
