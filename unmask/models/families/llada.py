"""LLaDA (2502.09992), LLaDA-MoE (2509.24389) and LLaDA2 (2512.15745)."""

from __future__ import annotations

from typing import Any

from unmask.errors import UserError
from unmask.models.families.base import Family
from unmask.models.families.layout import refuse, rotary

#: From a layer of transformers to one of LLaDA's blocks.
_BLOCK = (
    (r"self_attn\.([qkv])_proj\.", r"\1_proj."),
    (r"self_attn\.o_proj\.", "attn_out."),
    (r"mlp\.gate_proj\.", "ff_proj."),
    (r"mlp\.up_proj\.", "up_proj."),
    (r"mlp\.down_proj\.", "ff_out."),
    (r"input_layernorm\.", "attn_norm."),
    (r"post_attention_layernorm\.", "ff_norm."),
)


class LLaDA(Family):
    """LLaDA 8B and 1.5: Llama's layers under OLMo's names, with biases Qwen2's."""

    name, title = "llada", "LLaDA 8B, LLaDA 1.5"
    preset = "llada"
    types, architectures = ("llada",), ("LLaDAModelLM",)
    mask_token_id = 126336
    end_tokens = (126348,)  # <|eot_id|>
    objective = {"name": "mdlm", "variant": "llada"}
    vocabulary = "embedding_size"
    renames = (
        (r"^model\.embed_tokens\.", "model.transformer.wte."),
        (r"^model\.norm\.", "model.transformer.ln_f."),
        (r"^lm_head\.", "model.transformer.ff_out."),
        (r"^model\.layers\.", "model.transformer.blocks."),
        *_BLOCK,
    )

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        refuse(
            "LLaDA",
            raw,
            {
                "block_type": ("llama",), "activation_type": ("silu",), "layer_norm_type": ("rms",), "rope": (True,),
                "include_bias": (False, None), "bias_for_layer_norm": (False, None), "alibi": (False, None),
                "attention_layer_norm": (False, None), "input_emb_norm": (False, None), "scale_logits": (False, None),
                "layer_norm_with_affine": (True,), "clip_qkv": (None,), "attention_dropout": (0, None),
                "residual_dropout": (0, None), "embedding_dropout": (0, None),
            },
        )  # fmt: skip
        width, heads = raw["d_model"], raw["n_heads"]
        inner = raw.get("mlp_hidden_size")
        pairs = heads if raw.get("n_kv_heads") is None else raw["n_kv_heads"]
        if raw.get("n_kv_heads") is None and raw.get("multi_query_attention"):
            pairs = 1
        if raw.get("multi_query_attention") is not None and (pairs == 1) != raw["multi_query_attention"]:
            raise UserError(f"LLaDA: config.json has n_kv_heads={pairs} beside multi_query_attention; keep one of them")
        return {
            "model_type": "qwen2" if raw.get("include_qkv_bias") else "llama",
            "vocab_size": raw.get("embedding_size") or raw["vocab_size"],
            "hidden_size": width,
            "intermediate_size": raw["mlp_ratio"] * width if inner is None else inner,
            "num_hidden_layers": raw["n_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": pairs,
            "max_position_embeddings": raw.get("max_sequence_length") or 1024,
            "rms_norm_eps": raw.get("rms_norm_eps") or 1e-5,
            "rope_parameters": rotary(raw),
            "tie_word_embeddings": bool(raw.get("weight_tying")),
            **{key: raw[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id") if raw.get(key) is not None},
        }

    def rename(self, ours: str, raw: dict[str, Any]) -> str:
        theirs, size = super().rename(ours, raw), raw.get("block_group_size") or 1
        head, blocks, rest = theirs.partition(".blocks.")
        if size == 1 or not blocks:
            return theirs
        layer, _, tail = rest.partition(".")
        return f"{head}.block_groups.{int(layer) // size}.{int(layer) % size}.{tail}"


class LLaDAMoE(Family):
    """LLaDA-MoE 7B-A1B: Qwen3-MoE without normalised routing weights, whatever its config says of routing."""

    name, title = "llada_moe", "LLaDA-MoE"
    preset = "llada"
    types, architectures = ("lladamoe", "llada_moe"), ("LLaDAMoEModelLM",)
    mask_token_id = 156895
    objective = {"name": "mdlm", "variant": "llada"}

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        for what, part in {
            "a shared expert": ".shared_expert.",
            "an expert bias": ".expert_bias",
            "a dense layer": ".mlp.gate_proj.",
        }.items():
            if any(part in name for name in names):
                raise UserError(f"LLaDA-MoE with {what}: no module of transformers computes it, so it is not supported")
        refuse(
            "LLaDA-MoE",
            raw,
            {"qk_layernorm": (True,), "moe_router_score_function": ("softmax", None), "clip_qkv": (None,)}
            | {"partial_rotary_factor": (1, None), "attention_bias": (False, None)},
        )
        return self.kept(raw) | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": raw["expert_intermediate_size"],
            "num_experts": raw["num_experts"],
            "num_experts_per_tok": raw["num_experts_per_tok"],
            "norm_topk_prob": False,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        }


class LLaDA2(Family):
    """LLaDA2.0 and 2.1, mini and flash: GLM-4.5's layers, fused queries, keys and values."""

    name, title = "llada2", "LLaDA2.x"
    preset = "llada2"
    types, architectures = ("llada2_moe", "llada21_moe", "llada2_moe_veomni"), ("LLaDA2MoeModelLM",)
    mask_token_id = 156895
    objective = {"name": "block_diffusion", "variant": "llada2", "block_size": 32}
    renames = (
        (r"^model\.embed_tokens\.", "model.word_embeddings."),
        (r"\.self_attn\.", ".attention."),
        (r"\.o_proj\.", ".dense."),
        (r"\.q_norm\.", ".query_layernorm."),
        (r"\.k_norm\.", ".key_layernorm."),
        (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
    )
    fused = {"attention.query_key_value": ("attention.q_proj", "attention.k_proj", "attention.v_proj")}

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        if any(".attention.dense.bias" in name for name in names):
            raise UserError("LLaDA2 with use_bias: no module of transformers has a bias there, so it is not supported")
        if not raw.get("num_shared_experts"):
            raise UserError("LLaDA2 without shared experts: no module of transformers computes it: not supported")
        refuse(
            "LLaDA2",
            raw,
            {"score_function": ("sigmoid", None), "norm_head": (False, None)} | {"use_sliding_window": (False, None)},
        )
        heads = raw["num_attention_heads"]
        return self.kept(raw) | {
            "model_type": "glm4_moe",
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
            "attention_bias": any(".query_key_value.bias" in name for name in names),
            "use_qk_norm": any(".query_layernorm." in name for name in names),
            "rope_parameters": rotary(raw) | {"partial_rotary_factor": _or(raw.get("partial_rotary_factor"), 0.5)},
            "n_routed_experts": raw["num_experts"],
            "n_shared_experts": raw["num_shared_experts"],
            "num_experts_per_tok": raw["num_experts_per_tok"],
            "moe_intermediate_size": raw["moe_intermediate_size"],
            "first_k_dense_replace": raw.get("first_k_dense_replace") or 0,
            "n_group": _or(raw.get("n_group"), 8),
            "topk_group": _or(raw.get("topk_group"), 4),
            "routed_scaling_factor": _or(raw.get("routed_scaling_factor"), 2.5),
            "norm_topk_prob": True,
        }

    def optional(self, theirs: str) -> bool:
        return theirs.endswith(".expert_bias")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
