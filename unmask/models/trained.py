"""How a model was trained: what its config.json records, what its family is known by, what a user says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unmask.errors import UserError
from unmask.models.families import families, family_of, origin_of
from unmask.objectives import Objective, build, named, rebuild

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The model type of DiffusionGemma, which has no mask token.
DIFFUSION_GEMMA = "diffusion_gemma"


def objective_of(config: dict[str, Any], where: str = "config.json") -> Objective | None:
    """How the model of a config.json was trained: what its export says, else what its family is known by.

    UserError, naming `where`, for a record that no export has written.
    """
    recorded, family = config.get("unmask"), family_of(config)
    if recorded is not None:
        if not isinstance(recorded, dict) or not {"name", "options"} <= set(recorded):
            raise UserError(
                f'{where}: "unmask" is no record of an objective (name, options); take it out, or export again'
            )
        return rebuild(recorded["name"], recorded["options"])
    if family is None:
        return build(DIFFUSION_GEMMA, {}) if config.get("model_type") == DIFFUSION_GEMMA else None
    options, size = dict(family.objective), family.block_size(config)
    return build(options.pop("name"), options | ({} if size is None else {"block_size": size}))


def also(config: dict[str, Any]) -> tuple[str, ...]:
    """Names of other objectives that the model of a config.json may have been trained by: it does not tell."""
    family = family_of(config) if config.get("unmask") is None else None
    return family.also if family is not None else ()


def said(objective: str | Objective) -> Objective:
    """An objective that a user names: "block_diffusion,block_size=32", or one that was built."""
    return named(objective) if isinstance(objective, str) else objective


def masks(model: PreTrainedModel) -> bool:
    """Whether the folder that a model came from says that it was trained to fill in a mask token."""
    record = getattr(model.config, "unmask", None)
    if isinstance(record, dict) and isinstance(record.get("decoding"), dict):
        return record["decoding"].get("kind") in ("full", "block")
    return origin_of(model) is not None


def family_title(model: PreTrainedModel) -> str:
    """What a model that was trained to fill in a mask token is called."""
    origin = origin_of(model)
    return families[origin["family"]].title if origin else type(model).__name__
