"""Brute-force sampling: the whole sequence again at every step, through SDPA and a dense mask."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from unmask.attention import register

VOCABULARY, MASK, EOS = 40, 39, 38


def tiny(seed: int = 0, windows: int | None = None):
    """A random Qwen3 in fp64 with attention "unmask", and its twin with SDPA (transformers' eager softmax is fp32)."""
    register()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        use_sliding_window=windows is not None,
        sliding_window=windows,
        layer_types=["full_attention", "sliding_attention" if windows else "full_attention"],
        dtype="float64",
    )
    config.mask_token_id = MASK
    model = AutoModelForCausalLM.from_config(config, attn_implementation="unmask", dtype=torch.float64).eval()
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    return model, twin


@torch.no_grad()
def logits(twin, token: list[int], position: list[int], masks: dict[str, torch.Tensor]) -> torch.Tensor:
    """[rows, vocabulary]; masks: layer type -> bool [rows, rows], True where a row attends."""
    bias = {
        kind: torch.zeros(mask.shape).double().masked_fill(~mask, -1e300)[None, None] for kind, mask in masks.items()
    }
    output = twin(
        input_ids=torch.tensor([token]),
        position_ids=torch.tensor([position]),
        attention_mask=bias,
        use_cache=False,
    )
    return output.logits[0]


def block_mask(n: int, start: int, stop: int, size: int, window: int | None = None) -> torch.Tensor:
    """Clean rows [0, n), causal over blocks of `size`, then noisy rows [start, stop) after clean [0, start)."""
    rows = n + stop - start
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            mask[i, j] = j < (i // size + 1) * size and (window is None or j > i - window)
    for i in range(n, rows):
        for j in range(rows):
            mask[i, j] = j >= n or (j < start and (window is None or j > start - window))
    return mask
