"""Likelihoods under classifier-free guidance, as LLaDA's evaluation has them (`get_log_likelihood`, cfg_scale w):

    z = u + (w + 1) (c - u),     -log softmax(z)[token]

c are the logits of a noisy row, u those of the same row where every token of the prompt is the mask token: two passes.
Sources: Nie et al. 2410.18514, section 3.3; LLaDA, 2502.09992, appendix A.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.objectives.base import needs_mask

if TYPE_CHECKING:
    from unmask.models import RowModel
    from unmask.objectives import Objective
    from unmask.rows import Document, Rows

#: Rows whose logits are whole at a time.
CHUNK = 1024


def check(objective: Objective, guidance: float) -> None:
    """UserError for a model that does not see the prompt as a part of what it denoises."""
    if objective.decoding.kind != "full":
        raise UserError(
            f"guidance={guidance:g}: a likelihood is guided for models over whole sequences, and this one is "
            f"{type(objective).__name__}; leave it out"
        )


def without_prompt(document: Document, objective: Objective) -> Document:
    """The document with the mask token in place of what is not scored, and the same noise."""
    return replace(document, token=np.where(document.supervised, document.token, needs_mask(objective)))


def guided(row_model: RowModel, objective: Objective, rows: Rows, bare: Rows, guidance: float) -> Tensor:
    """-log p of the labelled rows, [n] in fp32 at least. bare: the same rows without prompt."""
    head, batches = row_model.head(), [row_model.collate(each) for each in (rows, bare)]
    hidden = [row_model.hidden(batch) for batch in batches]
    label, found = batches[0].label, []
    for start in range(0, len(label), CHUNK):
        part = slice(start, start + CHUNK)
        given, without = (head.logits(each[part]) for each in hidden)
        logits = without + (guidance + 1) * (given - without)
        if objective.excluded_token is not None:
            logits[:, objective.excluded_token] = -torch.inf
        found.append(torch.nn.functional.cross_entropy(logits, label[part], reduction="none"))
    return torch.cat(found) if found else label.new_zeros(0, dtype=torch.float32)
