"""Evaluation: the likelihood bound of held-out text, answers to held-out prompts, tasks of lm-eval."""

from unmask.evaluation.bound import Bound, Level, Measured, Share, bound, measure, text_bytes
from unmask.evaluation.evaluate import Evaluation, evaluate, evaluate_sets, named, shared
from unmask.evaluation.generation import generate
from unmask.evaluation.likelihood import log_likelihoods
from unmask.evaluation.tasks import Asked, evaluate_tasks

__all__ = [
    "Asked",
    "Bound",
    "Evaluation",
    "Level",
    "Measured",
    "Share",
    "bound",
    "evaluate",
    "evaluate_sets",
    "evaluate_tasks",
    "generate",
    "log_likelihoods",
    "measure",
    "named",
    "shared",
    "text_bytes",
]
