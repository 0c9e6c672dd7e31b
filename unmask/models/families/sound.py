"""What may be wrong with a model's config.json and generation_config.json, beside what transformers checks itself.

transformers checks the kinds of most fields and names them; what it lets pass (a string where a module computes with a
number, sizes that no machine holds) fails anywhere. Then the field is named that differs in kind from its default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.files import read_json
from unmask.hf import read_config
from unmask.models.families.layout import is_whole
from unmask.models.families.stored import INDEX, read_index

#: Layers, experts and the like are made one by one, so that a number of them that is out of reason never ends.
MOST = 100_000
#: Widths without which a layer holds nothing.
_SIZES = ("intermediate_size", "head_dim")
_COUNTS = ("num_", "n_layer", "n_head", "layers")


def read(folder: Path) -> dict[str, Any]:
    """A folder's config.json; UserError for a number, an index or a mask token in the folder that is none."""
    raw = read_config(folder)
    check(raw, folder / "config.json")
    if (generation := folder / "generation_config.json").exists():
        check(read_json(generation, "copy it again, or remove it"), generation)
    for index in (INDEX, "pytorch_model.bin.index.json"):
        if (folder / index).exists():
            read_index(folder / index)
    mask = raw.get("mask_token_id")
    if mask is not None and not (is_whole(mask) and mask >= 0):
        raise UserError(f"model.name={folder}: config.json has mask_token_id={mask!r}: give the id of a token, or null")
    return raw


def check(raw: dict[str, Any], where: Path | str) -> None:
    """UserError for a config in which a number is none that a model could have. where: it comes from."""
    for key, value in raw.items():
        if isinstance(value, dict):
            check(value, where)
        elif isinstance(value, float) and not abs(value) < 1e18:
            raise UserError(f"{where}: {key}={value:g} is out of reason; copy the file again")
        elif isinstance(value, int) and value < 1 and key in _SIZES:
            raise UserError(f"{where}: {key}={value} is no size; give a number of at least 1")
        elif isinstance(value, int) and abs(value) > (MOST if key.startswith(_COUNTS) else 2**48):
            raise UserError(f"{where}: {key}={str(value)[:20]} is out of reason; copy the file again")


def odd_field(raw: dict[str, Any]) -> str:
    """In brackets, the first field whose kind is not that of its default, as a remark; "" where there is none."""
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(raw["model_type"]).to_dict()
    except Exception:  # no model type of transformers, or one whose defaults do not go together
        return ""
    for key, value in raw.items():
        usual = default.get(key)
        if usual is not None and value is not None and _kind(value) is not _kind(usual):
            return f" ({key}={value!r} in config.json)"
    return ""


def told(error: Exception) -> str:
    """What an exception of transformers says; a KeyError is often nothing but the value that it does not know."""
    said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return f"it knows no {said!r}" if isinstance(error, KeyError) and " " not in said else said


def one_line(error: Exception) -> str:
    return " ".join(told(error).split())[:200]


def first_line(error: Exception) -> str:
    """The most telling line: StrictDataclass errors name the field first and what is wrong with it last."""
    lines = [line.strip() for line in told(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if lines[0].startswith(("Validation error", "Class validation error")) else lines[0]


def _kind(value: Any) -> type[Any]:
    return float if type(value) is int else type(value)
