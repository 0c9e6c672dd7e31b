"""The last layer for labelled rows only: keys and values of all rows, everything else of the rows the head will read.

Nothing after the last attention mixes rows, so queries, output projection and MLP of unlabelled rows are never used.
Saves about three quarters of one layer (12-17 % of a 4-layer model). Taken only for layers built like Llama's, and only
after it gave the layer's own result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unmask.attention import Plan
from unmask.models import rotary_attention
from unmask.models.rotary_attention import attention_over_rows


def skip_unlabelled(layer: nn.Module, window: int | None, rotary: nn.Module) -> bool:
    """Make `layer` compute labelled rows only when the plan asks for it; False when that is not proven for it."""
    parts = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm", "mlp")]
    attention = getattr(layer, "self_attn", None)
    if not all(isinstance(part, nn.Module) for part in parts) or not rotary_attention.like_llama(attention):
        return False
    return rotary_attention.replaced_if_proven(layer, _forward, _agrees, window, rotary)


def labelled_only(layer: Any) -> list[nn.Parameter]:
    """The parameters which only labelled rows pass through if the layer skips; none of one that cannot."""
    attention: Any = getattr(layer, "self_attn", None)
    if not rotary_attention.like_llama(attention):
        return []
    every_row = {*attention.k_proj.parameters(), *attention.v_proj.parameters()}
    return [parameter for parameter in layer.parameters() if parameter not in every_row]


def _forward(
    layer: Any, original: Callable[..., Tensor], window: int | None, hidden_states: Tensor, **kwargs: Any
) -> Tensor:
    """hidden_states [1, N, width] -> [1, labelled rows, width] under a plan with labelled queries, else as ever."""
    plan = kwargs.get("plan")
    if not isinstance(plan, Plan) or plan.labelled is None:
        return original(hidden_states, **kwargs)
    normed = layer.input_layernorm(hidden_states)
    embeddings = kwargs["position_embeddings"]
    out = attention_over_rows(layer.self_attn, normed, embeddings, plan, window, plan.labelled)
    hidden = hidden_states.index_select(1, plan.labelled) + out
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@torch.no_grad()
def _agrees(layer: Any, original: Callable[..., Tensor], window: int | None, rotary: nn.Module) -> bool:
    """The labelled rows of a small random pack, through both forwards."""
    device = next(layer.parameters()).device
    rows = rotary_attention.trial_rows()
    options: dict[str, Any] = {"windows": (window,), "backend": "reference", "device": device}
    plain, skipping = Plan.from_rows(rows, **options), Plan.from_rows(rows, **options, labelled_window=window)
    training = layer.training
    layer.eval()
    try:
        x, embeddings = rotary_attention.trial_input(layer, layer.self_attn.q_proj.weight.shape[1], rotary)
        expected = original(x, position_embeddings=embeddings, plan=plain)
        got = layer.forward(x, position_embeddings=embeddings, plan=skipping)
    except rotary_attention.BUILT_DIFFERENTLY:
        return False
    finally:
        layer.train(training)
    return rotary_attention.close(got, expected[:, torch.from_numpy(rows.labelled).to(device)])
