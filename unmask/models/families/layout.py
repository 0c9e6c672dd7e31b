"""What a family of checkpoints is: its configuration in transformers' terms, and its tensors in transformers' modules.

Tensors are mapped by `Part`s, which hold in both directions:

    theirs[rows]  ==  ours[at]

One of theirs may be several of ours one below the other (a fused query_key_value), and one of ours may be many of
theirs (transformers stacks the experts of a layer). Either way a part is a copy, so that a round trip changes no bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

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


class Family:
    """A family of checkpoints. Subclasses say how they differ from the model of transformers that computes the same.

    name: in the registry; types, architectures: what `model_type` and `architectures` of its config.json say;
    mask_token_id: where its config names none; objective: what it was trained by, for sampling and evaluation;
    end_tokens: that end an answer beside the tokeniser's EOS; renames: (pattern, replacement) from transformers' names
    to the family's, applied in order; fused: its name of a tensor -> the names, after `renames`, of its rows' parts.
    """

    name: ClassVar[str]
    #: Its models, for the documentation.
    title: ClassVar[str]
    types: ClassVar[tuple[str, ...]]
    architectures: ClassVar[tuple[str, ...]] = ()
    mask_token_id: ClassVar[int | None] = None
    objective: ClassVar[dict[str, Any]]
    end_tokens: ClassVar[tuple[int, ...]] = ()
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    fused: ClassVar[dict[str, tuple[str, ...]]] = {}
    #: Other objectives that some of its models were trained by, where config.json does not tell.
    also: ClassVar[tuple[str, ...]] = ()
    #: The preset of `unmask sample --as` that decodes as its authors do.
    preset: ClassVar[str | None] = None
    #: Fields of transformers' configuration that config.json has by the same name; null ones keep their default.
    fields: ClassVar[tuple[str, ...]] = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
        "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias",
        "attention_dropout",
        "pad_token_id", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    #: Its name of the field that holds the rows of the embedding.
    vocabulary: ClassVar[str] = "vocab_size"

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """The fields of transformers' configuration, with `model_type`. raw: config.json; names: the stored tensors.

        UserError, naming it, for what no module of transformers computes.
        """
        raise NotImplementedError

    def block_size(self, raw: dict[str, Any]) -> int | None:
        """The block size that config.json names, if any."""
        return None

    def mask(self, raw: dict[str, Any]) -> int | None:
        """The mask token of a model whose config.json names none."""
        return self.mask_token_id

    def kept(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields that have the same name in both configurations and a value."""
        found = {name: raw[name] for name in self.fields if raw.get(name) is not None}
        return {"rope_parameters": rotary(raw)} | found

    def rename(self, ours: str, raw: dict[str, Any]) -> str:
        """transformers' name of a tensor, its experts one by one, in the family's own terms."""
        for pattern, replacement in self.renames:
            ours = re.sub(pattern, replacement, ours)
        return ours

    def optional(self, theirs: str) -> bool:
        """Whether a checkpoint may lack a tensor, which is then zero."""
        return False

    def parts(self, shapes: Mapping[str, tuple[int, ...]], raw: dict[str, Any], merged: bool) -> Iterator[Part]:
        """Every part of a model. shapes: of transformers' tensors by name, tied ones once; merged: its checkpoint
        holds the experts of a layer together, [experts, out, in] by projection."""
        row: dict[str, int] = {}
        owner = {part: whole for whole, parts in self.fused.items() for part in parts}
        for ours, shape in shapes.items():
            for name, at in _atoms(ours, shape, merged):
                theirs = self.rename(name, raw)
                whole = next((key for key in owner if key in theirs), None)
                if whole is None:
                    yield Part(theirs, ours, at)
                    continue
                theirs = theirs.replace(whole, owner[whole])
                first = row.get(theirs, 0)
                row[theirs] = first + shape[0]
                yield Part(theirs, ours, at, (first, first + shape[0]))


class Own(Family):
    """transformers' own names, the experts of a layer one by one."""

    name = "transformers"


def _atoms(name: str, shape: tuple[int, ...], merged: bool) -> Iterator[tuple[str, tuple[int | slice, ...]]]:
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
        if raw.get(key) is not None and not (_whole(raw[key]) and raw[key] > 0):
            raise UserError(f"config.json has {key}={raw[key]!r}: give a whole number from 1 on")
    theta, scaling = raw.get("rope_theta"), raw.get("rope_scaling")
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0):
        raise UserError(f"config.json has rope_theta={theta!r}: give a number above 0")
    if scaling and not isinstance(scaling, dict):
        raise UserError(f"config.json has rope_scaling={scaling!r}: give an object with a type, or null")


def check_mask(raw: dict[str, Any]) -> None:
    """UserError for a mask_token_id of config.json that is no token."""
    mask = raw.get("mask_token_id")
    if mask is not None and not (_whole(mask) and mask >= 0):
        raise UserError(f"config.json has mask_token_id={mask!r}: give the id of a token, or null")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse(where: str, raw: dict[str, Any], wanted: dict[str, tuple[Any, ...]]) -> None:
    """UserError for a field that has another value than those: what it asks for, no module of transformers computes."""
    for key, values in wanted.items():
        if key in raw and raw[key] not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            raise UserError(f"{where}: config.json has {key}={raw[key]!r}, and only {known} is supported")
