"""Optimisers by name, and which parameters are decayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unmask.config import OptimizerConfig
from unmask.registry import Registry

#: name -> callable(parameter groups, OptimizerConfig) -> torch optimiser
optimizers = Registry("optimizer", {"adamw": "unmask.training.optimizers:adamw"})


def build(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of `config.name` over the trainable parameters of `model`."""
    return optimizers[config.name](groups(model, config.weight_decay), config)


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: decayed matrices, and the rest.

    Norms and biases are not decayed, nor are embeddings: every step shrinks all of their rows, but only the tokens it
    met push back. Tied weights count once, as embeddings.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if matrix else kept).append(parameter)
    candidates = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in candidates if group["params"]]


def adamw(parameters: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), one fused kernel a step."""
    return torch.optim.AdamW(parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
