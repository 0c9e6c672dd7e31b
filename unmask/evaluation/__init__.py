"""Evaluation: the likelihood bound of held-out text, with its standard error."""

from unmask.evaluation.bound import Bound, Level, Measured, Share, bound, measure, text_bytes
from unmask.evaluation.evaluate import Evaluation, describe, evaluate, evaluate_sets, named, shared

__all__ = [
    "Bound",
    "Evaluation",
    "Level",
    "Measured",
    "Share",
    "bound",
    "describe",
    "evaluate",
    "evaluate_sets",
    "measure",
    "named",
    "shared",
    "text_bytes",
]
