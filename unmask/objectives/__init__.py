"""Training objectives: each file opens with its formula; `objectives` finds one by name."""

from typing import Any

from unmask.errors import UserError
from unmask.objectives.base import Decoding, LabelledRows, LossTerms, Objective
from unmask.parsing import NotYaml, yaml_value
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


def named(text: str, **options: Any) -> Objective:
    """The objective of a text such as "block_diffusion,block_size=32"; values are YAML.

    options: more of them, which fill what the text leaves out and the objective has. UserError for other texts.
    """
    name, *parts = [part.strip() for part in text.split(",")]
    given: dict[str, Any] = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not sign or not key or key in given:
            raise UserError(
                f"objective {text!r} is not of the form NAME,option=value, as block_diffusion,block_size=32"
            )
        try:
            given[key] = yaml_value(value)
        except NotYaml as error:
            raise UserError(f"objective {text[:200]!r}: {key} is no valid YAML value: {error}") from None
    known = objectives[name].model_fields
    return build(name, {key: value for key, value in options.items() if key in known} | given)


def name_of(objective: Objective) -> str:
    """The name an objective is registered under."""
    return next(name for name in objectives.names() if objectives[name] is type(objective))


def described(objective: Objective) -> str:
    """An objective in a few words: its name, its variant, and what says how it is decoded."""
    decoding, words = objective.decoding, [name_of(objective)]
    if variant := getattr(objective, "variant", None):
        words.append(f"variant={variant}")
    if decoding.block_size is not None:
        words.append(f"block_size={decoding.block_size}")
    if decoding.shift and "shift" in type(objective).model_fields:
        words.append("shift=true")
    return " ".join(words)


__all__ = [
    "Decoding",
    "LabelledRows",
    "LossTerms",
    "Objective",
    "build",
    "described",
    "name_of",
    "named",
    "objectives",
    "rebuild",
]
