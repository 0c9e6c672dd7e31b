"""What may be wrong with a model's config.json and generation_config.json, beside what transformers checks itself.

transformers checks the kinds of most fields and names them; what it lets pass (a string where a module computes with a
number, sizes that no machine holds) fails anywhere. Then the field is named that differs in kind from its default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.errors import UserError

#: Layers, experts and the like are made one by one, so that a number of them that is out of reason never ends.
MOST = 100_000
#: Widths without which a layer holds nothing.
_SIZES = ("intermediate_size", "head_dim")
_COUNTS = ("num_", "n_layer", "n_head", "layers")


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


def _kind(value: Any) -> type[Any]:
    return float if type(value) is int else type(value)
