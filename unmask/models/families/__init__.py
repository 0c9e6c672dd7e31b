"""Families of checkpoints: how models that other people made become transformers' own, and go back.

A family (`unmask.models.families.layout.Family`) reads config.json and names tensors; `open_folder` fills transformers'
module from the files, and `write_folder` writes them as they were. Remote code that a folder names is never run. More
families come from entry points of the group `unmask.families`. DiffusionGemma is transformers' own and needs none.
"""

from unmask.models.families.folder import (
    ORIGIN,
    end_tokens,
    family_of,
    open_folder,
    origin_of,
    preset,
    write_folder,
)
from unmask.models.families.layout import Family
from unmask.registry import Registry

families = Registry(
    "family",
    {
        "llada": "unmask.models.families.llada:LLaDA",
        "llada_moe": "unmask.models.families.llada:LLaDAMoE",
        "llada2": "unmask.models.families.llada:LLaDA2",
        "dream": "unmask.models.families.qwen:Dream",
        "sdar": "unmask.models.families.qwen:SDAR",
        "a2d": "unmask.models.families.qwen:A2D",
        "fast_dllm_v2": "unmask.models.families.qwen:FastDLLM",
    },
    group="unmask.families",
)

__all__ = [
    "ORIGIN",
    "Family",
    "end_tokens",
    "families",
    "family_of",
    "open_folder",
    "origin_of",
    "preset",
    "write_folder",
]
