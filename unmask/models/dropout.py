"""Models are trained without the dropout and the router noise that their configuration asks for.

transformers draws both from the global generator, so that a loss would depend on the number of processes, the
micro-batches and the point where a run was resumed, instead of (seed, step). Attention computes none at all. A
configuration of the user's that asks for some is refused, a checkpoint's is reported; config.json stays what it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def notes(model: PreTrainedModel) -> list[str]:
    """What a model's own config.json asks for and does not get."""
    found = asked_for(model.config)
    listed = ", ".join(f"{name}={value:g}" for name, value in found.items())
    return [f"the model's config.json has {listed}: it is trained without"] if found else []


def _is_one(name: str, value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and any(part in name for part in NAMES)
