"""Evaluation: the likelihood bound of held-out text, with its standard error."""

from unmask.evaluation.bound import Bound, bound, text_bytes
from unmask.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Bound", "Evaluation", "bound", "evaluate", "text_bytes"]
