"""Families that are Qwen2's, Qwen3's or Llama's modules under another name: Dream, SDAR, A2D, Fast-dLLM v2."""

from __future__ import annotations

from typing import Any

from unmask.models.families.base import Family
from unmask.models.families.layout import refuse


class Qwen(Family):
    """What these have in common: fields of Qwen's sliding windows."""

    fields = (*Family.fields, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


class Dream(Qwen):
    """Dream 7B (2508.15487) and Dream-Coder: Qwen2, a row predicts the token after it."""

    name, title = "dream", "Dream 7B"
    preset = "dream"
    types, architectures = ("Dream",), ("DreamModel",)
    mask_token_id = 151666
    objective = {"name": "mdlm", "variant": "dream"}

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        return self.kept(raw) | {"model_type": "qwen2"}


class SDAR(Qwen):
    """SDAR (2510.06303) and TraDo (2509.06949): Qwen3 or, with experts, Qwen3-MoE; blocks of four."""

    name, title = "sdar", "SDAR, TraDo"
    preset = "sdar"
    types, architectures = ("sdar", "sdar_moe"), ("SDARForCausalLM", "SDARMoeForCausalLM")
    fields = (
        *Qwen.fields, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers",
    )  # fmt: skip
    mask_token_id = 151669
    objective = {"name": "block_diffusion", "variant": "sdar", "block_size": 4}

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        return self.kept(raw) | {"model_type": "qwen3_moe" if raw.get("num_experts") else "qwen3"}

    def block_size(self, raw: dict[str, Any]) -> int | None:
        return raw.get("block_size") or raw.get("block_length")


class A2D(Qwen):
    """Autoregressive Qwen2, Qwen3 and Llama that dLLM made diffusion models, of whole texts or of blocks.

    Their configs name no mask token, and do not tell which of the two.
    """

    name, title = "a2d", "A2D (dLLM)"
    preset = "llada"
    types = ("a2d-qwen3", "a2d-qwen2", "a2d-llama")
    objective, also = {"name": "mdlm", "variant": "llada"}, ("block_diffusion",)

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        kind = raw["model_type"].removeprefix("a2d-")
        if kind == "llama":
            refuse("A2D", raw, {"use_sliding_window": (False, None)})
        return self.kept(raw) | {"model_type": kind}

    def mask(self, raw: dict[str, Any]) -> int | None:
        return {"a2d-qwen3": 151669, "a2d-qwen2": 151665}.get(raw["model_type"])


class FastDLLM(Qwen):
    """Fast-dLLM v2 (2509.26328): Qwen2, blocks of `bd_size`, shifted."""

    name, title = "fast_dllm_v2", "Fast-dLLM v2"
    preset = "fast_dllm_v2"
    types, architectures = ("Fast_dLLM_Qwen",), ("Fast_dLLM_QwenForCausalLM",)
    mask_token_id = 151665
    objective = {"name": "fast_dllm_v2", "block_size": 32}

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        return self.kept(raw) | {"model_type": "qwen2"}

    def block_size(self, raw: dict[str, Any]) -> int | None:
        return raw.get("bd_size")
