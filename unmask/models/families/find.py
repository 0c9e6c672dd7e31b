"""Which family a checkpoint, or a model, belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UserError
from unmask.hf import fetching
from unmask.models.families import sound
from unmask.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.models.families.base import Family

families = Registry(
    "family",
    {
        "llada": "unmask.models.families.llada:LLaDA",
        "llada_moe": "unmask.models.families.llada:LLaDAMoE",
        "llada2": "unmask.models.families.llada:LLaDA2",
        "dream": "unmask.models.families.qwen:Dream",
        "sdar": "unmask.models.families.qwen:SDAR",
        "a2d": "unmask.models.families.qwen:A2D",
        "fast_dllm_v2": "unmask.models.families.qwen:FastDLLM",
        "diffusion_gemma": "unmask.models.families.diffusion_gemma:DiffusionGemma",
        "gguf": "unmask.models.families.transformers:Gguf",
        "run": "unmask.runs.open:Step",
        "transformers": "unmask.models.families.transformers:Transformers",
    },
    group="unmask.families",
)

#: What is in no other family.
DEFAULT = "transformers"
#: The field of a transformers config that says where a model came from.
ORIGIN = "origin"


def every_family() -> list[Family]:
    return [families[name]() for name in families.names()]


def family_at(path: Path) -> tuple[Family, dict[str, Any]]:
    """The family of the checkpoint at a path, and its config.json ({} where it has none); UserError for none."""
    if not path.exists():
        raise UserError(
            f"model.name={path}: no such folder or file (models are loaded from disk, not from a hub){fetching(path)}"
        )
    if path.is_dir() and (path / "config.json").exists():
        raw = sound.read(path)
        return family_of(raw, path / "config.json"), raw
    found = next((family for family in every_family() if family.holds(path)), None)
    if found is None:
        raise UserError(f"model.name={path}: no config.json in this folder, and it is no run with a checkpoint")
    return found, {}


def family_of(raw: dict[str, Any], where: Path | str = "config.json") -> Family:
    """The family that a config.json belongs to; transformers' own where that is none of the others.

    where: its path, for messages. UserError for a model type of a family with an architecture that is not the
    family's: another model.
    """
    known = every_family()
    architectures, kind = raw.get("architectures") or [], raw.get("model_type")
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{where} has architectures={architectures!r}: give a list of names")
    if kind is not None and not isinstance(kind, str):
        raise UserError(f"{where} has model_type={kind!r}: give a name")
    for family in known:  # LLaDA-MoE has LLaDA's model_type in some of its configs
        if any(name in family.architectures for name in architectures):
            return family
    found = next((family for family in known if kind in family.types), None)
    if found is not None and architectures and found.architectures:
        raise UserError(
            f"{where} has model_type={kind!r} and architectures={architectures}: {found.title} is "
            f"{' or '.join(found.architectures)}, and another model of that type is not supported"
        )
    return found or families[DEFAULT]()


def family_of_type(kind: str) -> Family:
    """The family that makes models of a type of transformers: one of that type, or the default."""
    known = (family for family in every_family() if kind in family.types and not family.foreign)
    return next(known, None) or families[DEFAULT]()


def family_of_model(model: PreTrainedModel) -> Family:
    """The family of a model: where it came from, else what its type says."""
    origin = origin_of(model)
    return families[origin["family"]]() if origin else family_of_type(model.config.model_type)


def origin_of(model: PreTrainedModel) -> dict[str, Any] | None:
    """The origin of a model that came from a foreign folder."""
    return getattr(model.config, ORIGIN, None)
