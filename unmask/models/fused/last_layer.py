"""The last layer for labelled rows only: keys and values of all rows, everything else of the rows the head will read.

Nothing after the last attention mixes rows, so queries, output projection and MLP of unlabelled rows are never used.
Saves about three quarters of one layer (12-17 % of a 4-layer model). Taken only for layers built like Llama's, and only
where it gives the layer's own result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unmask.attention import Plan
from unmask.models.fused.rotary_attention import attention_over_rows, like_llama

if TYPE_CHECKING:
    from unmask.models.decoder import DecoderSpec


def skipping(layer: nn.Module, spec: DecoderSpec) -> Callable[..., Any] | None:
    """A forward for the last layer that computes labelled rows only when the plan asks for it; None if built otherwise.

    It is proven by `unmask.models.prove`.
    """
    parts = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm", "mlp")]
    attention = getattr(layer, "self_attn", None)
    if spec.rotary is None or not all(isinstance(part, nn.Module) for part in parts) or not like_llama(attention):
        return None
    return partial(_forward, layer, layer.forward, spec.windows[-1])


def labelled_only(layer: Any) -> list[nn.Parameter]:
    """The parameters which only labelled rows pass through if the layer skips; none of one that cannot."""
    attention: Any = getattr(layer, "self_attn", None)
    if not like_llama(attention):
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
