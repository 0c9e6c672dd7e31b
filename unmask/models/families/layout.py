"""How tensors of a checkpoint lie in those of a model, and what the fields of its config.json may be.

Tensors are mapped by `Part`s, which hold in both directions:

    theirs[rows]  ==  ours[at]

One of theirs may be several of ours one below the other (a fused query_key_value), and one of ours may be many of
theirs (transformers stacks the experts of a layer). Either way a part is a copy, so that a round trip changes no bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from unmask.errors import UserError

#: How transformers names the stacked weights of experts: [experts, 2 * intermediate, hidden], [experts, hidden, ...].
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


#: Fields that are whole numbers from one on wherever config.json has them.
COUNTS = (
    "vocab_size", "embedding_size", "hidden_size", "d_model", "num_hidden_layers", "n_layers", "num_attention_heads",
    "n_heads", "num_key_value_heads", "n_kv_heads", "head_dim", "max_position_embeddings", "max_sequence_length",
    "block_group_size", "block_size", "block_length", "bd_size",
)  # fmt: skip
#: Those that are so where there are experts, and elsewhere often 0.
EXPERT_COUNTS = ("num_experts_per_tok", "moe_intermediate_size", "expert_intermediate_size")


class Part(NamedTuple):
    """theirs[rows] == ours[at]; rows: (first, after the last) along the first axis, None for all."""

    theirs: str
    ours: str
    at: tuple[int | slice, ...] = ()
    rows: tuple[int, int] | None = None


def atoms(name: str, shape: tuple[int, ...], merged: bool) -> Iterator[tuple[str, tuple[int | slice, ...]]]:
    """(name, index into the tensor) of what a checkpoint stores of a tensor: stacked experts one by one, or by kind."""
    stacked = STACKED.fullmatch(name)
    if stacked is None:
        yield name, ()
        return
    prefix, kind = stacked.groups()
    half = slice(0, shape[1] // 2), slice(shape[1] // 2, shape[1])
    projections = {"gate_proj": half[0], "up_proj": half[1]} if kind == "gate_up_proj" else {kind: slice(None)}
    for projection, within in projections.items():
        if merged:
            yield f"{prefix}.{projection}", (slice(None), within)
            continue
        for expert in range(shape[0]):
            yield f"{prefix}.{expert}.{projection}.weight", (expert, within)


def rotary(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers' `rope_parameters` of the older fields: rope_theta and rope_scaling."""
    theta = raw.get("rope_theta")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else float(theta)}
    scaling = dict(raw.get("rope_scaling") or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    return found | scaling


def check(raw: dict[str, Any]) -> None:
    """UserError for a field of config.json that no family takes as it is: quantised weights, a size that is none."""
    if raw.get("quantization_config"):
        raise UserError("config.json has quantization_config: the folder is quantised; name one with the whole weights")
    for key in (*COUNTS, *(EXPERT_COUNTS if raw.get("num_experts") else ())):
        if raw.get(key) is not None and not (is_whole(raw[key]) and raw[key] > 0):
            raise UserError(f"config.json has {key}={raw[key]!r}: give a whole number from 1 on")
    theta, scaling = raw.get("rope_theta"), raw.get("rope_scaling")
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0):
        raise UserError(f"config.json has rope_theta={theta!r}: give a number above 0")
    if scaling and not isinstance(scaling, dict):
        raise UserError(f"config.json has rope_scaling={scaling!r}: give an object with a type, or null")


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse(where: str, raw: dict[str, Any], wanted: dict[str, tuple[Any, ...]]) -> None:
    """UserError for a field that has another value than those: what it asks for, no module of transformers computes."""
    for key, values in wanted.items():
        if key in raw and raw[key] not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            raise UserError(f"{where}: config.json has {key}={raw[key]!r}, and only {known} is supported")
