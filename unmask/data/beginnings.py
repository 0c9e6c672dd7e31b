"""What texts begin with: the token that many models (Llama, Gemma) were trained to find in front of every document.

The tokeniser itself knows it, as what `tokenizer(text)` puts in front of a text, and keeps it on the disk: so does the
copy that a dataset, a run and an export have, and prompts begin as the training documents did. It is context, like a
prompt: never noised, never scored. A chat template says itself what a conversation begins with.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from unmask.errors import UserError

Bos = bool | Literal["auto"]


def beginning(tokenizer: Any) -> tuple[int, ...]:
    """The ids that a tokeniser puts in front of a text; () for none, and for no tokeniser."""
    if tokenizer is None:
        return ()
    text = _encodable(tokenizer)
    whole, bare = (tokenizer(text, add_special_tokens=each, verbose=False)["input_ids"] for each in (True, False))
    if not bare:
        return tuple(token for token in whole if token != tokenizer.eos_token_id)
    places = (place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return tuple(whole[: next(places, 0)])


def _encodable(tokenizer: Any) -> str:
    """A text that a tokeniser has ids for, "" where none is found."""
    for text in ("a", "0", *sorted(tokenizer.get_vocab())[:8]):
        try:
            if tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
                return text
        except Exception:  # a vocabulary without this letter, and without a token for what is unknown
            continue
    return ""


def begin_with(tokenizer: Any, bos: Bos, name: str) -> Any:
    """The tokeniser itself for "auto", else one that puts its beginning token in front of texts, or nothing.

    name: what the user sets this by. Raises UserError for a tokeniser that has none, or that cannot be told.
    """
    if bos == "auto" or (tokenizer is not None and bos == bool(beginning(tokenizer))):
        return tokenizer
    said = f"{name}={str(bos).lower()}"
    if tokenizer is None:
        raise UserError(f"{said} has no effect without a tokeniser")
    if bos and tokenizer.bos_token_id is None:
        raise UserError(f"{said}: the tokeniser has no beginning-of-text token; leave it out")
    told = copy.deepcopy(tokenizer)
    if getattr(told, "is_fast", False):
        told.add_bos_token = bos
    if bos != bool(beginning(told)):
        raise UserError(f"{said}: this tokeniser cannot be told so; use one of the fast kind (tokenizer.json)")
    return told


def begun(token: Sequence[int] | np.ndarray, begin: Sequence[int]) -> bool:
    """Whether ids begin so already, such as those of a text that a chat template has written."""
    return len(token) >= len(begin) and list(token[: len(begin)]) == list(begin)


def shown(tokenizer: Any) -> str:
    """What texts begin with, in words."""
    return " ".join(tokenizer.convert_ids_to_tokens(list(beginning(tokenizer)))) or "none"
