"""Evaluation: the likelihood bound of held-out text, with its standard error."""

from unmask.evaluation.bound import Bound, bound, text_bytes

__all__ = ["Bound", "bound", "text_bytes"]
