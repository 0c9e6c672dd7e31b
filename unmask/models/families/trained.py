"""How a model was trained: what its config.json records, what its family is known by, what a user says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unmask.errors import UserError
from unmask.models.families import family_of, family_of_model
from unmask.objectives import Objective, build, named, rebuild

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    if not family.objective:
        return None
    options, size = dict(family.objective), family.block_size(config)
    return build(options.pop("name"), options | ({} if size is None else {"block_size": size}))


def also(config: dict[str, Any]) -> tuple[str, ...]:
    """Names of other objectives that the model of a config.json may have been trained by: it does not tell."""
    return family_of(config).also if config.get("unmask") is None else ()


def said(objective: str | Objective) -> Objective:
    """An objective that a user names: "block_diffusion,block_size=32", or one that was built."""
    return named(objective) if isinstance(objective, str) else objective


def masks(model: PreTrainedModel) -> bool:
    """Whether the folder that a model came from says that it was trained to fill in a mask token."""
    record = getattr(model.config, "unmask", None)
    if isinstance(record, dict) and isinstance(record.get("decoding"), dict):
        return record["decoding"].get("kind") in ("full", "block")
    family = family_of_model(model)
    return family.masked and bool(family.objective)
