"""Training objectives: each file opens with its formula; `objectives` finds one by name."""

from typing import Any

from unmask.errors import UserError
from unmask.objectives.base import Decoding, Head, LossTerms, Objective
from unmask.registry import Registry

objectives = Registry(
    "objective",
    {
        "ar": "unmask.objectives.ar:AR",
        "mdlm": "unmask.objectives.mdlm:MDLM",
        "block_diffusion": "unmask.objectives.block_diffusion:BlockDiffusion",
        "fast_dllm_v2": "unmask.objectives.fast_dllm_v2:FastDLLMv2",
        "i_dlm": "unmask.objectives.i_dlm:IDLM",
        "diffusion_gemma": "unmask.objectives.diffusion_gemma:DiffusionGemma",
    },
)


def build(name: str, options: dict[str, Any] | None = None) -> Objective:
    """The objective `name` with these options; a wrong option is a UserError that names the valid ones."""
    if "mask_token_id" in (options or {}):
        raise UserError("objective.mask_token_id is not an option: it follows from the model; set model.mask_token_id")
    given = options or {}
    for option, field in objectives[name].model_fields.items():
        if field.exclude and option in given:
            raise UserError(f"objective.{option} is not an option: it follows from the model; leave it out")
    objective = rebuild(name, given)
    for option, needs in objective.unused().items():
        if option in given and given[option] != type(objective).model_fields[option].default:
            raise UserError(f"objective {name}: {option}={given[option]!r} has no effect here: it needs {needs}")
    return objective


def rebuild(name: str, options: dict[str, Any]) -> Objective:
    """The objective `name` from all of its options, as a checkpoint records them."""
    return objectives[name].parse(options, f"objective {name}")


__all__ = ["Decoding", "Head", "LossTerms", "Objective", "build", "objectives", "rebuild"]
