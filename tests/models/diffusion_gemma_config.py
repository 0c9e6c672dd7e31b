"""The configuration of the tests' DiffusionGemma: kinds of layers with heads of their own, experts, a vision tower."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    # Without one, for noise draws every id, and transformers begins with a zero row for padding, which norms blow up.
    "pad_token_id": None, "bos_token_id": 2, "eos_token_id": 1,
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "sliding_window": 6, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "patch_size": 4,
    "position_embedding_size": 8,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "diffusion_gemma", "text_config": TEXT, "vision_config": VISION, "canvas_length": 4,
    "image_token_id": 63, "boi_token_id": 62, "eoi_token_id": 61,
}  # fmt: skip
