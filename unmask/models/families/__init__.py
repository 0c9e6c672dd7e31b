"""Families of checkpoints: how models that other people made become transformers' own, and go back.

A family (`unmask.models.families.base.Family`) reads config.json and names tensors; its `open` fills transformers'
module from the files, and `write_folder` writes them as they were. Remote code that a folder names is never run. More
families come from entry points of the group `unmask.families`.
"""

from unmask.models.families.base import Family
from unmask.models.families.find import (
    ORIGIN,
    families,
    family_at,
    family_of,
    family_of_model,
    family_of_type,
    origin_of,
)
from unmask.models.families.folder import write_folder
from unmask.models.families.transformers import Transformers

__all__ = [
    "ORIGIN",
    "Family",
    "Transformers",
    "families",
    "family_at",
    "family_of",
    "family_of_model",
    "family_of_type",
    "origin_of",
    "write_folder",
]
