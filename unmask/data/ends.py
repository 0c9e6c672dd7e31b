"""Whether what the assistant says is learnt together with the token that ends it: without one, a model never stops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from unmask.data.beginnings import beginning, begun
from unmask.rows import Document

#: Tokens at the end of an answer among which its end token is looked for: templates write a line break after it.
TAIL = 3


def answers(document: Document) -> list[np.ndarray]:
    """The token ids of every stretch that is learnt from, after one that is not."""
    edges = np.flatnonzero(np.diff(document.supervised.astype(np.int8), prepend=1, append=0))
    starts = [edge for edge in edges if edge < len(document) and document.supervised[edge]]
    return [document.token[start : edges[np.searchsorted(edges, start) + 1]] for start in starts]


def _without(begin: tuple[int, ...], document: Document) -> Document:
    """A document after what it begins with, which is no prompt."""
    first = len(begin) if begun(document.token, begin) else 0
    return Document(document.token[first:], document.supervised[first:], document.sample)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that may end an answer: special tokens with a role (EOS, ...) or without one, but not the mask token."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids) - {tokenizer.mask_token_id})


def end_policy(documents: Iterable[Document], tokenizer: Any) -> str | None:
    """Where an end token is learnt: 'each answer (<|im_end|>)', 'last answer (...)', 'never' or '75.0% of ...'.

    An end token is one of `special_tokens` among the last three of an answer; 'last': that of each
    document's last answer, and no other. None where nothing is an answer, that is, learnt after what is not.
    """
    special, begin = special_tokens(tokenizer), beginning(tokenizer)
    found, last, names = [], [], set()
    for document in documents:
        stretches = answers(_without(begin, document))
        for number, answer in enumerate(stretches):
            ends = [token for token in answer[-TAIL:].tolist() if token in special]
            names |= set(tokenizer.convert_ids_to_tokens(ends[-1:]))
            found.append(bool(ends))
            last.append(number == len(stretches) - 1)
    if not found:
        return None
    if not any(found):
        return "never"
    share = "each answer" if all(found) else "last answer" if found == last else f"{np.mean(found):.1%} of answers"
    return f"{share} ({', '.join(sorted(names))})"
