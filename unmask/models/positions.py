"""How long a document may be, and rotary positions that are the same whatever else is in a pass.

transformers chooses the frequencies of `longrope` (Phi-3.5, Phi-4-mini: 2402.13753) and of `dynamic` scaling by the
longest document of the pass: one token too many, in a document beside it or in an answer that grows, changes what all
rows compute, and what a cache has kept. Here a model keeps those of documents up to the length it began with, and
longer ones are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import nn

from unmask.errors import UserError, counted


class Limit(NamedTuple):
    """Tokens of the longest document, and the setting of config.json that says so."""

    tokens: int
    name: str


def limit_of(config: Any) -> Limit | None:
    """The longest document of a model with this configuration; None where it names no limit."""
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    found = [] if longest is None else [Limit(longest, "max_position_embeddings")]
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings")
        if _by_pass(rope.get("rope_type")) and original is not None:
            name = (
                f"original_max_position_embeddings: frequencies by length, rope_type={rope['rope_type']}, are not run"
            )
            found.append(Limit(original, name))
    return min(found, default=None)


def check_positions(model: Any, longest: int, where: str, key: str) -> None:
    """UserError when a document of `longest` tokens has more than the positions that the model was made for.

    Positions count from 0 in every document, so it is not the length of a pack that matters. key: what cuts documents.
    """
    limit = limit_of(model.config)
    if limit is not None and longest > limit.tokens:
        raise UserError(
            f"{where}: a document (or the part of one that a pack holds) has {counted(longest, 'token')}, and the "
            f"model {counted(limit.tokens, 'position')} ({limit.name}): set {key} to {limit.tokens} or less"
        )


def fix(model: nn.Module) -> None:
    """Let rotary embeddings that choose their frequencies by the pass keep those they were made with."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_by_pass, kinds.values() if isinstance(kinds, dict) else [kinds])):
            chosen = getattr(type(module).forward, "__wrapped__", None)  # what transformers' decorator leaves
            if chosen is not None:
                module.forward = partial(chosen, module)


def _by_pass(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The settings of rotary positions, of a model with several kinds of layers one each."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
