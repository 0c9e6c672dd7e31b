"""Models are trained without the dropout and the router noise that their configuration asks for.

transformers draws both from the global generator, so that a loss would depend on the number of processes, the
micro-batches and the point where a run was resumed, instead of (seed, step). Attention computes none at all. A
configuration of the user's that asks for some is refused, a checkpoint's is told of; config.json stays what it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unmask.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Parts of the names of settings, and of the attributes that modules keep them in.
NAMES = ("drop", "jitter")


def asked_for(config: Any) -> dict[str, float]:
    """The settings of a transformers configuration that make a training pass draw random numbers, with their values."""
    fields = config.get_text_config().to_dict()
    return {
        name: value
        for name, value in fields.items()
        if _is_one(name, value) and value and not name.startswith(("classifier", "summary"))
    }


def refuse(fields: dict[str, Any]) -> None:
    """UserError for a model.config that asks for some."""
    for name, value in fields.items():
        if _is_one(name, value) and value:
            raise UserError(
                f"model.config.{name}={value:g}: unmask trains without it, for the loss is a function of the seed on "
                f"any number of processes; set it to 0 or leave it out"
            )


def off(model: PreTrainedModel) -> None:
    """Switch it off in every module; UserError for a model that draws random numbers all the same."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_one(name, value):
                setattr(module, name, 0.0)
    _check(model)


def notes(model: PreTrainedModel) -> list[str]:
    """What a model's own config.json asks for and does not get."""
    found = asked_for(model.config)
    listed = ", ".join(f"{name}={value:g}" for name, value in found.items())
    return [f"the model's config.json has {listed}: it is trained without"] if found else []


def _is_one(name: str, value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and any(part in name for part in NAMES)


@torch.no_grad()
def _check(model: PreTrainedModel) -> None:
    """A pass of two tokens in training mode must leave the global generators as they are."""
    from unmask.models.decoder import Probe

    device, training = model.get_input_embeddings().weight.device, model.training
    token = torch.zeros((1, 2), dtype=torch.long, device=device)
    before = _generators(device)
    model.train()
    try:
        model.base_model(
            input_ids=token, position_ids=torch.arange(2, device=device)[None], plan=Probe(), use_cache=False
        )
    finally:
        model.train(training)
    if not all(map(torch.equal, before, _generators(device))):
        raise UserError(
            f"{type(model).__name__} draws random numbers while it is trained, by other means than the settings of "
            f"config.json that unmask knows: its loss would not be a function of the seed"
        )


def _generators(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
