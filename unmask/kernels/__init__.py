"""Fused operations; their tests hold each to the same in plain torch (tests/kernels/plain.py)."""

from unmask.kernels.confidence import entropy_of_correct
from unmask.kernels.linear_cross_entropy import Head
from unmask.kernels.rms_norm import rms_norm
from unmask.kernels.rope import rope
from unmask.kernels.soft_embedding import soft_embedding
from unmask.kernels.swiglu import swiglu_down
from unmask.kernels.vocabulary_parallel import VocabularyShard

__all__ = [
    "Head",
    "VocabularyShard",
    "entropy_of_correct",
    "rms_norm",
    "rope",
    "soft_embedding",
    "swiglu_down",
]
