"""Tiny checkpoints in the layouts of published families, and their forward passes in plain torch, from the formulas.

Nothing here knows transformers or unmask: tensors are read by the names under which the families publish them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, INNER, LAYERS, HEADS, PAIRS, SIZE, VOCABULARY = 16, 24, 3, 4, 2, 4, 40
EXPERTS, CHOSEN, EXPERT = 8, 2, 6
Tensors = dict[str, Tensor]


class Published(NamedTuple):
    """config: config.json; tensors: by published name; logits: of token ids [N], every token seeing all."""

    config: dict[str, Any]
    tensors: Tensors
    logits: Callable[[Tensor], Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, base: float, part: float = 1.0) -> Tensor:
    """Rotary embedding of x [heads, N, size]: pairs (d, d + half) of its first part * size entries."""
    size = int(x.shape[-1] * part)
    angle = torch.arange(x.shape[1]).double()[:, None] * base ** (-torch.arange(0, size, 2).double() / size)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [heads, N, size], k and v [pairs, N, size] -> [N, heads * size], without a mask."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    weight = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weight @ v).transpose(0, 1).flatten(1)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(0, 1)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def linear(x: Tensor, t: Tensors, name: str) -> Tensor:
    return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def random(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1)
        if name.endswith(("norm.weight", "ln_f.weight")):
            tensor = tensor + 1
        found[name] = tensor.to(dtype)
    return found


def llada(dtype: torch.dtype = torch.float32, **changes: Any) -> Published:
    """LLaDA 8B as its repository has it; changes: to its config.json."""
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "auto_map": {"AutoModel": "modeling_llada.LLaDA"},
        "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": HEADS, "mlp_hidden_size": INNER,
        "mlp_ratio": 4, "vocab_size": VOCABULARY - 2, "embedding_size": VOCABULARY, "max_sequence_length": 64,
        "rope": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False, "include_bias": False,
        "include_qkv_bias": False, "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms",
        "block_group_size": 1, "multi_query_attention": None, "alibi": False, "mask_token_id": 39, "pad_token_id": 1,
        "eos_token_id": 1, "scale_logits": False, "init_device": "meta", "flash_attention": False, **changes,
    }  # fmt: skip
    inner = config["mlp_hidden_size"] or config["mlp_ratio"] * WIDTH
    pairs = config["n_kv_heads"] or (1 if config["multi_query_attention"] else HEADS)
    group = config["block_group_size"]

    def block(i: int) -> str:
        root = "model.transformer."
        return f"{root}blocks.{i}" if group == 1 else f"{root}block_groups.{i // group}.{i % group}"

    shapes: dict[str, tuple[int, ...]] = {"model.transformer.wte.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        at = block(i)
        for name, rows in {"q": HEADS * SIZE, "k": pairs * SIZE, "v": pairs * SIZE}.items():
            shapes[f"{at}.{name}_proj.weight"] = (rows, WIDTH)
            if config["include_qkv_bias"]:
                shapes[f"{at}.{name}_proj.bias"] = (rows,)
        shapes |= {
            f"{at}.attn_out.weight": (WIDTH, HEADS * SIZE), f"{at}.ff_proj.weight": (inner, WIDTH),
            f"{at}.up_proj.weight": (inner, WIDTH), f"{at}.ff_out.weight": (WIDTH, inner),
            f"{at}.attn_norm.weight": (WIDTH,), f"{at}.ff_norm.weight": (WIDTH,),
        }  # fmt: skip
    shapes["model.transformer.ln_f.weight"] = (WIDTH,)
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (VOCABULARY, WIDTH)
    t = random(shapes, dtype)

    def logits(ids: Tensor) -> Tensor:
        eps, base = config["rms_norm_eps"], config["rope_theta"]
        w = {name: tensor.float() for name, tensor in t.items()}
        x = w["model.transformer.wte.weight"][ids]
        for i in range(LAYERS):
            at = block(i)
            y = norm(x, w[f"{at}.attn_norm.weight"], eps)
            q, k, v = (heads(linear(y, w, f"{at}.{name}_proj")) for name in "qkv")
            x = x + linear(attend(rotate(q, base), rotate(k, base), v), w, f"{at}.attn_out")
            y = norm(x, w[f"{at}.ff_norm.weight"], eps)
            x = x + swiglu(y, *(w[f"{at}.{name}.weight"] for name in ("ff_proj", "up_proj", "ff_out")))
        x = norm(x, w["model.transformer.ln_f.weight"], eps)
        return x @ w["model.transformer." + ("wte" if config["weight_tying"] else "ff_out") + ".weight"].T

    return Published(config, t, logits)


def qwen(
    kind: str, architecture: str, *, third: bool = False, bias: bool = True, stored_head: bool = False, **changes: Any
) -> Published:
    """Dream, SDAR, A2D and Fast-dLLM v2: Qwen2 with biases, or Qwen3 (third) with norms of queries and keys."""
    config = {
        "architectures": [architecture], "model_type": kind, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": PAIRS, "hidden_act": "silu",
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1,
        "use_sliding_window": False, "sliding_window": None, "auto_map": {"AutoModel": "modeling.Other"}, **changes,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for name, rows in {"q": HEADS * SIZE, "k": PAIRS * SIZE, "v": PAIRS * SIZE}.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, WIDTH)
            if bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
            if third and name != "v":
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (SIZE,)
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE), f"{at}.mlp.gate_proj.weight": (INNER, WIDTH),
            f"{at}.mlp.up_proj.weight": (INNER, WIDTH), f"{at}.mlp.down_proj.weight": (WIDTH, INNER),
            f"{at}.input_layernorm.weight": (WIDTH,), f"{at}.post_attention_layernorm.weight": (WIDTH,),
        }  # fmt: skip
    shapes["model.norm.weight"] = (WIDTH,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    t = random(shapes, torch.float32)
    if stored_head:
        t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()

    def logits(ids: Tensor) -> Tensor:
        eps, base = config["rms_norm_eps"], config["rope_theta"]
        x = t["model.embed_tokens.weight"][ids]
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            y = norm(x, t[f"{at}.input_layernorm.weight"], eps)
            q, k, v = (heads(linear(y, t, f"{at}.self_attn.{name}_proj")) for name in "qkv")
            if third:
                q, k = (norm(each, t[f"{at}.self_attn.{n}_norm.weight"], eps) for n, each in (("q", q), ("k", k)))
            x = x + linear(attend(rotate(q, base), rotate(k, base), v), t, f"{at}.self_attn.o_proj")
            y = norm(x, t[f"{at}.post_attention_layernorm.weight"], eps)
            x = x + swiglu(y, *(t[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        return norm(x, t["model.norm.weight"], eps) @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T

    return Published(config, t, logits)


def llada_moe(*, normalised: bool = False, **changes: Any) -> Published:
    """LLaDA-MoE: softmax over all experts, the weights of the chosen as they are, or normalised."""
    config = {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_act": "silu", "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 50000, "rope_scaling": None,
        "tie_word_embeddings": False, "dense_intermediate_size": 32, "expert_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": None, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
        "moe_layer_freq": [1] * LAYERS, "qk_layernorm": True, "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False, "norm_topk_prob": None, "routed_scaling_factor": 2.5,
        "router_num_group": None, "router_topk_group": None, "partial_rotary_factor": 1, "clip_qkv": None,
        "attention_bias": False, "attention_dropout": 0.0, "pad_token_id": 1, "eos_token_id": 1, **changes,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HEADS * SIZE, WIDTH) for name in "qkv"}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (SIZE,) for name in "qk"}
        shapes[f"{at}.self_attn.o_proj.weight"] = (WIDTH, HEADS * SIZE)
        shapes |= {f"{at}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, WIDTH)
        for e in range(EXPERTS):
            shapes |= {f"{at}.mlp.experts.{e}.{name}_proj.weight": (EXPERT, WIDTH) for name in ("gate", "up")}
            shapes[f"{at}.mlp.experts.{e}.down_proj.weight"] = (WIDTH, EXPERT)
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    t = random(shapes, torch.float32)

    def logits(ids: Tensor) -> Tensor:
        eps, base = config["rms_norm_eps"], config["rope_theta"]
        x = t["model.embed_tokens.weight"][ids]
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            y = norm(x, t[f"{at}.input_layernorm.weight"], eps)
            q, k, v = (heads(linear(y, t, f"{at}.self_attn.{name}_proj")) for name in "qkv")
            q, k = (norm(each, t[f"{at}.self_attn.{n}_norm.weight"], eps) for n, each in (("q", q), ("k", k)))
            x = x + linear(attend(rotate(q, base), rotate(k, base), v), t, f"{at}.self_attn.o_proj")
            y = norm(x, t[f"{at}.post_attention_layernorm.weight"], eps)
            probability, index = (y @ t[f"{at}.mlp.gate.weight"].T).softmax(-1).topk(CHOSEN, -1)
            probability = probability / probability.sum(-1, True) if normalised else probability
            x = x + mixed(y, probability, index, lambda e, name, at=at: t[f"{at}.mlp.experts.{e}.{name}_proj.weight"])
        return norm(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T

    return Published(config, t, logits)


def sdar_moe(**changes: Any) -> Published:
    """SDAR's mixture: LLaDA-MoE's tensors, normalised weights, fields as Qwen3-MoE names them."""
    made = llada_moe(normalised=True)
    kept = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings", "num_experts",
        "num_experts_per_tok", "attention_bias", "attention_dropout", "pad_token_id", "eos_token_id",
    )  # fmt: skip
    config = {key: made.config[key] for key in kept} | {
        "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "intermediate_size": INNER,
        "moe_intermediate_size": EXPERT, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "head_dim": SIZE, "block_size": 4, "router_aux_loss_coef": 0.001, "output_router_logits": False,
        "use_sliding_window": False, "sliding_window": None, **changes,
    }  # fmt: skip
    return made._replace(config=config)


def mixed(y: Tensor, weight: Tensor, index: Tensor, of: Callable[[int, str], Tensor]) -> Tensor:
    """The experts' outputs for rows y [N, width], one row and choice at a time."""
    rows = [
        sum(
            w * swiglu(row, *(of(int(e), name) for name in ("gate", "up", "down"))) for w, e in zip(ws, es, strict=True)
        )
        for row, ws, es in zip(y, weight, index.tolist(), strict=True)
    ]
    return torch.stack(rows)


def llada2(dtype: torch.dtype = torch.float32, *, merged: bool = False, bias: bool = True, **changes: Any) -> Published:
    """LLaDA2: fused queries, keys and values, a dense layer, then sigmoid routing within groups beside one shared."""
    config = {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": PAIRS, "head_dim": SIZE, "hidden_act": "silu", "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 600000, "rope_scaling": None,
        "partial_rotary_factor": 0.5, "use_qkv_bias": False, "use_bias": False, "tie_word_embeddings": False,
        "norm_head": False, "num_experts": EXPERTS, "num_shared_experts": 1, "num_experts_per_tok": CHOSEN,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "moe_intermediate_size": EXPERT,
        "first_k_dense_replace": 1, "score_function": "sigmoid", "pad_token_id": 1, "eos_token_id": 1,
        "moe_router_enable_expert_bias": bias, **changes,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.attention.query_key_value.weight": ((HEADS + 2 * PAIRS) * SIZE, WIDTH)}
        shapes |= {f"{at}.attention.{name}_layernorm.weight": (SIZE,) for name in ("query", "key")}
        shapes[f"{at}.attention.dense.weight"] = (WIDTH, HEADS * SIZE)
        shapes |= {f"{at}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        if i == 0:
            shapes |= {f"{at}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.weight"] = (WIDTH, INNER)
            continue
        shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, WIDTH)
        if bias:
            shapes[f"{at}.mlp.gate.expert_bias"] = (EXPERTS,)
        each = {"gate": (EXPERT, WIDTH), "up": (EXPERT, WIDTH), "down": (WIDTH, EXPERT)}
        shapes |= {f"{at}.mlp.shared_experts.{name}_proj.weight": shape for name, shape in each.items()}
        if merged:
            shapes |= {f"{at}.mlp.experts.{name}_proj": (EXPERTS, *shape) for name, shape in each.items()}
        else:
            shapes |= {f"{at}.mlp.experts.{e}.{name}_proj.weight": each[name] for e in range(EXPERTS) for name in each}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    t = random(shapes, dtype)
    t |= {name: tensor.float() for name, tensor in t.items() if name.endswith("expert_bias")}

    def logits(ids: Tensor) -> Tensor:
        eps, base, part = config["rms_norm_eps"], config["rope_theta"], config["partial_rotary_factor"]
        w = {name: tensor.float() for name, tensor in t.items()}
        x = w["model.word_embeddings.weight"][ids]
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            y = norm(x, w[f"{at}.input_layernorm.weight"], eps)
            fused = linear(y, w, f"{at}.attention.query_key_value")
            q, k, v = map(heads, fused.split([HEADS * SIZE, PAIRS * SIZE, PAIRS * SIZE], -1))
            q, k = (
                norm(q, w[f"{at}.attention.query_layernorm.weight"], eps),
                norm(k, w[f"{at}.attention.key_layernorm.weight"], eps),
            )
            x = x + linear(attend(rotate(q, base, part), rotate(k, base, part), v), w, f"{at}.attention.dense")
            y = norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
            if i == 0:
                x = x + swiglu(y, *(w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
                continue
            score = (y @ w[f"{at}.mlp.gate.weight"].T).sigmoid()
            choice = score + w.get(f"{at}.mlp.gate.expert_bias", torch.zeros(EXPERTS))
            groups = choice.unflatten(-1, (config["n_group"], -1))
            best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
            open_ = torch.zeros(groups.shape[:2]).scatter(1, best, 1).bool()
            index = groups.masked_fill(~open_[..., None], -torch.inf).flatten(1).topk(CHOSEN, -1).indices
            weight = score.gather(1, index)
            weight = weight / weight.sum(-1, keepdim=True) * config["routed_scaling_factor"]

            def of(e: int, name: str, at: str = at) -> Tensor:
                return (
                    w[f"{at}.mlp.experts.{name}_proj"][e] if merged else w[f"{at}.mlp.experts.{e}.{name}_proj.weight"]
                )

            shared = (w[f"{at}.mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + mixed(y, weight, index, of) + swiglu(y, *shared)
        return norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T

    return Published(config, t, logits)


def without(made: Published, *keys: str) -> Published:
    return made._replace(config={key: value for key, value in made.config.items() if key not in keys})


PUBLISHED: dict[str, Callable[[], Published]] = {
    "LLaDA": llada,
    "LLaDA, biases, grouped, tied": lambda: llada(include_qkv_bias=True, block_group_size=2, weight_tying=True),
    "LLaDA, null fields": lambda: llada(n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=2, mask_token_id=None),
    "LLaDA, one pair": lambda: llada(n_kv_heads=None, multi_query_attention=True),
    "LLaDA-MoE": llada_moe,
    "LLaDA2": llada2,
    "LLaDA2, merged": lambda: llada2(merged=True, model_type="llada2_moe_veomni"),
    "LLaDA2, fields missing": lambda: without(llada2(bias=False), "use_qk_norm", "head_dim", "norm_head"),
    "Dream": lambda: qwen("Dream", "DreamModel", mask_token_id=38),
    "SDAR": lambda: qwen("sdar", "SDARForCausalLM", third=True, bias=False, head_dim=SIZE, block_size=4),
    "SDAR, experts": sdar_moe,
    "A2D Qwen3": lambda: qwen("a2d-qwen3", "A2DQwen3LMHeadModel", third=True, bias=False, head_dim=SIZE),
    "A2D Qwen2": lambda: qwen("a2d-qwen2", "A2DQwen2LMHeadModel", tie_word_embeddings=True),
    "A2D Qwen2, stored head": lambda: qwen(
        "a2d-qwen2", "A2DQwen2LMHeadModel", stored_head=True, tie_word_embeddings=True
    ),
    "A2D Llama": lambda: qwen("a2d-llama", "A2DLlamaLMHeadModel", bias=False),
    "Fast-dLLM v2": lambda: qwen("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", bd_size=8, mask_token_id=39),
}
