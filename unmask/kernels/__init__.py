"""Fused operations, each beside a plain-torch reference that its test holds it to."""

from unmask.kernels.linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
