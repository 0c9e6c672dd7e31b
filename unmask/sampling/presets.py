"""How published models are decoded: for each name, the options that its authors describe, as far as we know them.

| name         | source                                                                                              |
|--------------|-----------------------------------------------------------------------------------------------------|
| llada        | LLaDA generate.py, Nie 2502.09992: the most confident tokens, as many at every step, whole sequence |
| dream        | Dream generation_utils.py, Ye 2508.15487: lowest entropies, as many as its timesteps say            |
| dream_chat   | Dream demo_multiturn_chat.py: the same, and by chance which ones (alg_temp 0.1)                     |
| fast_dllm    | Fast-dLLM v1, Wu 2505.22618: whole-sequence models with a dual cache and a threshold                |
| fast_dllm_v2 | Fast-dLLM v2, Wu 2509.26328: blocks filled by sub-blocks under a threshold                          |
| sdar         | SDAR generate.py, Cheng 2510.06303: blocks, "low_confidence_dynamic"                                |
| llada2       | LLaDA2 modeling_llada2_moe.py, 2512.15745: blocks, threshold 0.95; 2.1's editing of tokens is not   |
"""

from __future__ import annotations

from typing import Any

#: Options by name of the preset; what is given beside a preset wins.
PRESETS: dict[str, dict[str, Any]] = {
    "llada": {"method": "full", "strategy": "low_confidence"},
    "dream": {
        "method": "full",
        "strategy": "low_entropy",
        "schedule": "timesteps",
        "tempered": True,
        "temperature": 0.2,
        "top_p": 0.95,
    },
    "dream_chat": {
        "method": "full",
        "strategy": "low_entropy",
        "schedule": "timesteps",
        "tempered": True,
        "temperature": 0.4,
        "top_p": 0.95,
        "alg_temp": 0.1,
    },
    "fast_dllm": {"method": "dual_cache", "strategy": "threshold", "threshold": 0.9, "block_size": 32},
    "fast_dllm_v2": {
        "method": "block",
        "strategy": "threshold",
        "threshold": 0.9,
        "sub_block_size": 8,
        "tempered": True,
    },
    "sdar": {"method": "block", "strategy": "threshold", "threshold": 0.85, "schedule": "fixed", "tempered": True},
    "llada2": {"method": "block", "strategy": "threshold", "threshold": 0.95, "schedule": "fixed", "tempered": True},
}
