"""transformers' tensor plan of a decoder: which of its linear layers a tensor axis divides, and how.

`unmask.parallel.tensor` carries it out. Only plans of plain linear layers are, where every column-parallel layer has a
row-parallel one beside it and nothing else holds a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

COLUMN, ROW = "colwise", "rowwise"
#: Styles of transformers' plans; of a module that is replicated, gradients are summed over the axis.
KNOWN = (COLUMN, ROW, "replicated_with_grad_allreduce")


@dataclass(frozen=True)
class TensorPlan:
    """Names of modules of a decoder (its base model): linear layers by style with the width that is divided, and the
    modules that hold them."""

    columns: dict[str, int]
    rows: dict[str, int]
    regions: tuple[str, ...]


def tensor_plan(model: Any) -> TensorPlan | str:
    """transformers' tensor plan of a model; why there is none, or none that is carried out here."""
    kind, base = type(model).__name__, model.base_model
    styles: dict[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not styles:
        return f"transformers has no tensor plan for {kind}"
    by_style: dict[str, dict[str, Any]] = {style: {} for style in KNOWN}
    divided = [(name, module) for name, module in base.named_modules() if not _row_by_row(base, name)]
    for name, module in divided:
        for pattern, style in styles.items():
            if not fnmatchcase(name.removeprefix("decoder."), pattern):  # a text model inside of another
                continue
            if style not in KNOWN:
                return f"{name} is divided as {style!r} in the plan of {kind}"
            if style in (COLUMN, ROW) and type(module) is not nn.Linear:
                return f"{name} is a {type(module).__name__}, and only plain linear layers divide"
            by_style[style][name] = module
    columns = {name: module.out_features for name, module in by_style[COLUMN].items()}
    rows = {name: module.in_features for name, module in by_style[ROW].items()}
    regions = tuple(dict.fromkeys(name.rpartition(".")[0] for name in rows))
    for name in columns:
        if name.rpartition(".")[0] not in regions:
            return f"{name} has no row-parallel layer beside it in the plan of {kind}"
    for name, module in divided:
        matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if matrix and name not in {*columns, *rows} and module is not model.get_input_embeddings():
            return f"{name} is not in the plan of {kind}"
    return TensorPlan(columns, rows, regions)


def _row_by_row(base: Any, name: str) -> bool:
    """Whether a module stays whole: it works on a rank's own rows, one by one, or not at all."""
    return any(fnmatchcase(name, each) or fnmatchcase(name, f"{each}.*") for each in getattr(base, "undivided", ()))
