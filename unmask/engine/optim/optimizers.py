"""Optimisers by name, and which parameters are decayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unmask.config import OptimizerConfig
from unmask.engine.optim.masters import mastered
from unmask.registry import Registry

#: name -> callable(parameter groups, OptimizerConfig) -> torch optimiser
optimizers = Registry(
    "optimizer", {"adamw": "unmask.engine.optim.optimizers:adamw", "muon": "unmask.engine.optim.muon:MuonAdamW"}
)

#: Keys of a parameter group that follow the config, also in a run that goes on from a checkpoint of another config.
SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")

#: And what says how torch's optimisers compute, which no checkpoint decides.
FIXED = (
    *SETTINGS, "amsgrad", "capturable", "dampening", "decoupled_weight_decay", "differentiable", "foreach", "fused",
    "maximize",
)  # fmt: skip


def build(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of `config.name` over the trainable parameters of `model`, of those in half precision over fp32
    copies (`unmask.engine.optim.masters`)."""
    make = optimizers[config.name]
    return mastered(groups(model, config.weight_decay), lambda groups: make(groups, config))


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Up to four parameter groups, by their `role`: hidden (matrices inside of layers), experts (stacks of them),
    decayed (the head's) and kept, which is not decayed.

    Norms and biases are not decayed, nor are embeddings: every step shrinks all of their rows, but only the tokens it
    met push back. Tied weights count once, as embeddings. Experts are a group of their own because they may lie on
    another mesh, which no fused update crosses.
    """
    embeddings = {
        id(each) for module in model.modules() if isinstance(module, nn.Embedding) for each in module.parameters()
    }
    # A row that is trained by itself (model.lora.train: [mask_token]) is of an embedding, too.
    embeddings |= {id(each) for name, each in model.named_parameters() if ".trainable_tokens_delta." in name}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head = {id(parameter) for parameter in output.parameters()} if output is not None else set()
    members: dict[str, list[nn.Parameter]] = {"hidden": [], "experts": [], "decayed": [], "kept": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            inside = "hidden" if parameter.ndim == 2 else "experts"
            members[("decayed" if id(parameter) in head else inside) if matrix else "kept"].append(parameter)
    return [
        {"params": found, "weight_decay": 0.0 if role == "kept" else weight_decay, "role": role}
        for role, found in members.items()
        if found
    ]


def named_groups(model: nn.Module) -> list[tuple[str, list[str]]]:
    """(role, names of its parameters) of every parameter group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [(group["role"], [names[each] for each in group["params"]]) for group in groups(model, 0.0)]


def adamw(parameters: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), one fused kernel a step; with means in
    fewer bits (`config.state`) see `unmask.engine.optim.low_precision`."""
    if config.state != "full":
        from unmask.engine.optim.low_precision import LowPrecisionAdamW

        return LowPrecisionAdamW(parameters, config)
    return torch.optim.AdamW(parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
