"""Tiny models of several families, and the same weights in transformers' own model under a dense 4-D mask."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from unmask.attention import NAME, register
from unmask.config import ModelConfig
from unmask.models import load
from unmask.models.decoder import DecoderSpec, spec_of
from unmask.models.families import family_of_type
from unmask.models.fused.fuse import fuse
from unmask.models.load import adapt
from unmask.models.prove import proofs_of
from unmask.objectives import Objective, build
from unmask.rows import Document, Rows

VOCABULARY, MASK, WINDOW = 40, 3, 5

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_SHAPE, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **_SHAPE},
    "qwen2": {"model_type": "qwen2", **{k: v for k, v in _SHAPE.items() if k != "head_dim"}},
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": WINDOW},
    "qwen3_sliding": {
        "model_type": "qwen3",
        **_SHAPE,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_SHAPE,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}

#: What the objectives' rows are made with; every kind of visibility the package knows.
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "block_diffusion": ("block_diffusion", {"block_size": 4, "draws": 2}),
    "mdlm": ("mdlm", {}),
    "ar": ("ar", {}),
    "fast_dllm_v2": ("fast_dllm_v2", {"block_size": 4}),
}


def tiny(family: str, dtype: str = "float64", fused: bool = True, **changes: Any) -> Any:
    """A loaded model with large random weights, so that every connection matters."""
    config = {**FAMILIES[family], **changes}
    options = {"config": config, "dtype": dtype, "mask_token_id": MASK, "fused": False}
    model = load(ModelConfig(**options)).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim > 1 or "bias" in name else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread)
    if dtype == "float64":
        _exact_norms(model)
    elif fused:
        fuse(model, proofs_of(model))
    return model


def stock(model: Any) -> Any:
    """The same weights in transformers' own model with its SDPA attention."""
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="sdpa")
    twin.load_state_dict(model.state_dict())
    twin.tie_weights()
    if model.dtype == torch.float64:
        twin.set_experts_implementation("eager")
        _exact_norms(twin)
    return twin


def stock_hidden(twin: Any, rows: Rows) -> Tensor:
    """Last hidden states [rows, width] of a stock model under the dense masks of the rows, one per attention kind."""
    window = getattr(twin.config, "sliding_window", None)
    masks = {
        "full_attention": torch.from_numpy(window_mask(rows, None))[None, None],
        "sliding_attention": torch.from_numpy(window_mask(rows, window))[None, None],
    }
    types = set(getattr(twin.config, "layer_types", None) or ["full_attention"])
    if twin.config.model_type == "mistral":
        types = {"sliding_attention"}
    mask: Any = masks if len(types) > 1 else masks[types.pop()]
    token, position = (torch.from_numpy(x)[None] for x in (rows.token, rows.position))
    return twin.model(input_ids=token, position_ids=position, attention_mask=mask, use_cache=False)[0][0]


def window_mask(rows: Rows, window: int | None) -> np.ndarray:
    """bool [N, N], pair by pair: a window moves a row's `lo` up to `window - 1` before itself or its block's start."""
    n, clean = len(rows), rows.clean
    mask = np.zeros((n, n), bool)
    for r in range(n):
        start = r if r < clean else rows.hi[r]
        for c in range(n):
            near = window is None or c >= start - (window - 1)
            own = r >= clean and rows.block[r] == rows.block[c]
            mask[r, c] = rows.lo[r] <= c < rows.hi[r] and near if c < clean else own
    return mask


def rows_of(name: str, lengths: tuple[int, ...] = (13, 6)) -> tuple[Objective, Rows]:
    """An objective bound to the mask token, and its rows of two packed documents, the first with a prompt."""
    kind, options = OBJECTIVES[name]
    objective = build(kind, options).model_copy(update={"mask_token_id": MASK})
    generator = np.random.default_rng(0)
    documents = [
        Document(generator.integers(4, VOCABULARY, n), np.arange(n) >= (3 if i == 0 else 0), i)
        for i, n in enumerate(lengths)
    ]
    return objective, objective.rows(documents, 1, objective.levels(documents, 1))


def _exact_norms(model: torch.nn.Module) -> None:
    """Norms in fp64: transformers' compute in fp32 whatever the dtype, which would hide differences below 1e-6."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps  # type: ignore[union-attr]
            shift = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
            module.forward = partial(_norm, module, eps, shift)


def _norm(module: Any, eps: float, shift: float, x: Tensor) -> Tensor:
    return (module.weight + shift) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def spec_of_config(model_type: str, **options: Any) -> DecoderSpec:
    """The description of the model that a configuration of transformers makes, without its weights."""
    register()
    config = AutoConfig.for_model(model_type, **options)
    with torch.device("meta"):
        made = family_of_type(model_type).auto().from_config(config, dtype=torch.float32, attn_implementation=NAME)
    adapt(made)
    return spec_of(made)
