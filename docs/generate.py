"""Writes the tables of the documentation that follow from the code: config keys, options, combinations tested on ranks.

    python docs/generate.py            rewrite the tables in place
    python docs/generate.py --check    exit with 1, naming the page, when one is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A field's meaning is the `#:` comment above it, its
type, limits and default come from the pydantic model.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from unmask.config import Config, ObjectiveConfig, Section, type_name
from unmask.data import Reading
from unmask.models.families import families
from unmask.objectives import objectives
from unmask.sampling.options import Options
from unmask.tracking import trackers

DOCS = Path(__file__).resolve().parent
TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def comments(model: type[BaseModel]) -> dict[str, str]:
    """field -> the `#:` lines above it, in the model and in what it inherits from."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, BaseModel) or kind is BaseModel:
            continue
        pending: list[str] = []
        for line in inspect.getsource(kind).splitlines():
            text = line.strip()
            field = FIELD.match(line)
            if text.startswith("#:"):
                pending.append(text.removeprefix("#:").strip())
                continue
            if field and pending:
                found[field[1]] = " ".join(pending)
            pending = []
    return found


def limits(metadata: list[Any]) -> str:
    """The bounds of a field, such as ">= 0, < 1"."""
    bounds = [f"{sign} {value}" for item in metadata for name, sign in LIMITS.items()
              if (value := getattr(item, name, None)) is not None]  # fmt: skip
    return ", ".join(bounds)


def default(value: Any) -> str:
    """A default as it would be written in YAML."""
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, Enum):
        value = value.value
    text = repr(value) if isinstance(value, float) else json.dumps(list(value) if isinstance(value, tuple) else value)
    return f"`{text.strip(chr(34))}`"


def rows(model: type[BaseModel], prefix: str = "") -> list[list[str]]:
    """[key, type, default, meaning] of every field; of a section inside, its fields."""
    meaning = comments(model)
    table = []
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            table += rows(field.annotation, f"{prefix}{name}.")
            continue
        kind = ", ".join(filter(None, [type_name(field.annotation), limits(field.metadata)]))
        value = default(field.get_default(call_default_factory=True))
        table.append([f"`{prefix}{name}`", kind, value, meaning.get(name, "")])
    return table


def markdown(table: list[list[str]], head: tuple[str, ...] = ("key", "takes", "default", "meaning")) -> str:
    lines = [list(head), ["---"] * len(head), *table]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def configuration() -> str:
    """One table a section of the config."""
    parts = []
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        note = "\nThe other keys are the objective's own options: [objectives](objectives.md).\n"
        parts.append(f"### {name}\n\n{markdown(rows(section, name + '.'))}{note if section is ObjectiveConfig else ''}")
    return "\n".join(parts)


def objective_options() -> str:
    """One table an objective."""
    return "\n".join(f"### Options of `{name}`\n\n{markdown(rows(objectives[name]))}" for name in BUILTIN)


def tracker_options() -> str:
    """One table of the options of all built-in trackers that take some."""
    kinds = {name: getattr(trackers[name], "Options", None) for name in trackers.names() if name in TRACKERS}
    table = [row for name, kind in kinds.items() if kind for row in rows(kind, f"log.options.{name}.")]
    return markdown(table, ("option", "takes", "default", "meaning"))


def sampler_options() -> str:
    return markdown(rows(Options), ("option", "takes", "default", "meaning"))


def reading_options() -> str:
    return markdown(rows(Reading), ("option", "takes", "default", "meaning"))


def masks(family: Any) -> str:
    """The mask tokens of a family, by the model types that have one of their own."""
    own = {kind: family().mask({"model_type": kind}) for kind in family.types}
    return ", ".join(dict.fromkeys(str(mask) for mask in own.values() if mask is not None))


def foreign() -> str:
    """The families of checkpoints: how their configs name them, what computes them, what they were trained by."""
    table = []
    for family in (families[name] for name in families.names() if families[name].types):
        options = dict(family.objective)
        named = [options.pop("name"), *(f"{key}={value}" for key, value in options.items() if key != "block_size")]
        own = ", ".join(f"`{kind}`" for kind in [*family.types, *family.architectures])
        size = str(options.get("block_size") or (family.sized_by and f"its {family.sized_by}"))
        method = objectives[family.objective["name"]]().decoding.kind
        decoded = f"`--as {family.preset}`" if family.preset else f"`method={method}`"
        table.append([family.title, own, masks(family), size, " ".join(named), decoded])
    columns = ("models", "model_type or architectures", "mask token", "block size", "objective", "sampled as published")
    return markdown(table, columns)


def parallelism() -> str:
    """Objective x placement x exchange -> the numbers of ranks on which the parity matrix tests it."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.parallel.matrix import CELLS, MATRIX
    from tests.parallel.trainer_cases import OBJECTIVES

    table = []
    for placement, exchange in CELLS:
        line = [placement, "none" if placement == "block" else exchange]
        for objective in OBJECTIVES:
            cell = (objective, placement, exchange)
            proven = [case for case in MATRIX if (case.objective, case.placement, case.exchange) == cell]
            ranks = {
                case.ranks for case in proven if case.blocks > 1 and not case.zero and case.tensor == case.pipeline == 1
            }
            line.append(", ".join(map(str, sorted(ranks))))
        table.append(line)
    return markdown(table, ("placement", "exchange", *OBJECTIVES))


def sharding() -> str:
    """Mesh x level of ZeRO -> the objectives with which the parity matrix tests it, and their checkpointing."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.parallel.matrix import SHARDED

    found: dict[tuple[int, ...], list[Any]] = {}
    for case in SHARDED:
        found.setdefault((case.replicas, case.shards, case.blocks, case.zero or 3), []).append(case)
    table = []
    for sizes, cases in sorted(found.items()):
        names = [case.objective + (" (experts)" if case.model == "experts" else "") for case in cases]
        objectives = ", ".join(
            dict.fromkeys(name.replace("clip auto", "block_diffusion (clip auto)") for name in names)
        )
        checkpointing = ", ".join(dict.fromkeys(case.checkpointing for case in cases))
        table.append([*map(str, sizes), objectives, checkpointing])
    columns = ("data_parallel_size", "shard_size", "block_parallel_size", "zero", "objectives", "checkpointing")
    return markdown(table, columns)


def tensor() -> str:
    """Mesh with a tensor axis -> the objectives with which the parity matrix tests it, and their checkpointing."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.parallel.matrix import TENSOR

    found: dict[tuple[int, ...], list[Any]] = {}
    for case in TENSOR:
        found.setdefault((case.replicas, case.shards, case.blocks, case.tensor), []).append(case)
    table = []
    for sizes, cases in sorted(found.items()):
        columns = [[case.objective for case in cases], [case.checkpointing for case in cases]]
        table.append([*map(str, sizes), *(", ".join(dict.fromkeys(column)) for column in columns)])
    axes = ("data_parallel_size", "shard_size", "block_parallel_size", "model_parallel_size")
    return markdown(table, (*axes, "objectives", "checkpointing"))


def pipeline() -> str:
    """Mesh with a pipeline -> the schedules and objectives with which the parity matrix tests it."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.parallel.matrix import PIPELINE

    found: dict[tuple[int, ...], list[Any]] = {}
    for case in PIPELINE:
        found.setdefault((case.pipeline, case.replicas, case.shards, case.blocks, case.tensor), []).append(case)
    table = []
    for sizes, cases in sorted(found.items()):
        names = [case.objective + (" (experts)" if case.model == "experts" else "") for case in cases]
        names = [name.replace("clip auto", "block_diffusion (clip auto)") for name in names]
        columns = [[case.schedule for case in cases], names, [case.checkpointing for case in cases]]
        table.append([*map(str, sizes), *(", ".join(dict.fromkeys(column)) for column in columns)])
    axes = ("pipeline_stages", "data_parallel_size", "shard_size", "block_parallel_size", "model_parallel_size")
    return markdown(table, (*axes, "schedule", "objectives", "checkpointing"))


def experts() -> str:
    """Mesh with an expert axis -> what the parity matrix tests it with, as `tensor`."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.parallel.matrix import EXPERTS

    found: dict[tuple[int, ...], list[Any]] = {}
    for case in EXPERTS:
        found.setdefault((case.replicas, case.shards, case.blocks, case.experts), []).append(case)
    table = []
    for sizes, cases in sorted(found.items()):
        levels = {str(case.zero or 3) if case.shards > 1 else "" for case in cases}
        objectives = [
            case.objective + (" (routers' losses)" if any("loss" in option for option in case.options) else "")
            for case in cases
        ]
        columns = [sorted(levels), objectives, [case.checkpointing for case in cases]]
        table.append([*map(str, sizes), *(", ".join(dict.fromkeys(column)) for column in columns)])
    axes = ("data_parallel_size", "shard_size", "block_parallel_size", "expert_parallel_size")
    return markdown(table, (*axes, "zero", "objectives", "checkpointing"))


def further() -> str:
    """What else is tested on several processes: hybrids, adapters, DiffusionGemma; mesh, placement, checkpointing."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.parallel.test_diffusion_gemma import GEMMA_MATRIX
    from tests.parallel.test_hybrids import CASES
    from tests.parallel.test_lora import MATRIX, QUANTISED

    adapters = [
        (f"adapters{' on four bits' if case.options == QUANTISED else ''}, {case.objective}", case) for case in MATRIX
    ]
    table = []
    for name, case in [*((case.objective, case) for case in [*CASES, *GEMMA_MATRIX]), *adapters]:
        sizes = (case.replicas, case.shards, case.blocks, case.tensor, case.experts)
        placement = case.placement if case.blocks > 1 else ""
        table.append([name, *map(str, sizes), placement, str(case.zero or ""), case.checkpointing, case.dtype])
    axes = ("data_parallel_size", "shard_size", "block_parallel_size", "model_parallel_size", "expert_parallel_size")
    return markdown(table, ("objective", *axes, "placement", "zero", "checkpointing", "dtype"))


TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
BUILTIN = ("ar", "mdlm", "block_diffusion", "fast_dllm_v2", "i_dlm", "diffusion_gemma")
TABLES = {
    "configuration": configuration,
    "objectives": objective_options,
    "sampler": sampler_options,
    "trackers": tracker_options,
    "reading": reading_options,
    "parallelism": parallelism,
    "families": foreign,
    "sharding": sharding,
    "tensor": tensor,
    "pipeline": pipeline,
    "experts": experts,
    "further": further,
}


def generated(text: str) -> str:
    """The page with its tables as they should be now."""
    return TABLE.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}<!-- end -->", text)


def main() -> int:
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := generated(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(("out of date: " if "--check" in sys.argv else "rewrote: ") + ", ".join(stale))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
