"""Shared by the objectives' tests: random packs, rows spelled out one by one, and a tiny model under a dense mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from unmask.objectives import Objective, build
from unmask.rows import CLEAN, Document, Rows

MASK = 0


def bound(name: str, **options: Any) -> Objective:
    """An objective that knows its mask token."""
    return build(name, options).model_copy(update={"mask_token_id": MASK})


def document(length: int, sample: int = 0, prompt: int = 0, vocabulary: int = 1000) -> Document:
    """Random tokens that are never MASK; the first `prompt` are not supervised."""
    token = np.random.default_rng(sample).integers(1, vocabulary, length)
    return Document(token, np.arange(length) >= prompt, sample)


@st.composite
def packs(draw: Any) -> list[Document]:
    """One to three short documents with any supervision, in any order of samples."""
    samples = draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=3, unique=True))
    documents = []
    for number, sample in enumerate(samples):
        supervised = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=13)))
        documents.append(Document(np.arange(1, len(supervised) + 1) + 100 * number, supervised, sample))
    return documents


def spelled(rows: Rows) -> dict[tuple[int, int, int], tuple[int, int, float, frozenset]]:
    """{(document, view, position): (token, label, weight, the rows seen)}; view -1 is the clean stream.

    The views of one block are numbered in the order of their instances.
    """
    rows.check()
    names: list[tuple[int, int, int]] = []
    views: dict[tuple[int, int], list[int]] = {}
    starts, sizes = rows.blocks()
    first = np.repeat(rows.position[starts], sizes) if len(starts) else np.empty(0, np.int64)
    for row in range(len(rows)):
        view = CLEAN
        if rows.block[row] != CLEAN:
            instances = views.setdefault((int(rows.document[row]), int(first[row - rows.clean])), [])
            if rows.block[row] not in instances:
                instances.append(int(rows.block[row]))
            view = instances.index(int(rows.block[row]))
        names.append((int(rows.document[row]), view, int(rows.position[row])))
    assert len(set(names)) == len(rows)
    mask = rows.dense_mask()
    return {
        name: (
            int(rows.token[row]),
            int(rows.label[row]),
            float(rows.weight[row]),
            frozenset(names[column] for column in np.flatnonzero(mask[row])),
        )
        for row, name in enumerate(names)
    }


def tiny_model(vocabulary: int = 13, seed: int = 0) -> torch.nn.Module:
    """A stock transformers Qwen3 in fp64 with large random weights; id 0 is its mask token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.4)
    return model


def logits(model: torch.nn.Module, token: Any, position: Any, mask: Any) -> Tensor:
    """[rows, vocabulary] of a stock model under a dense bool mask [rows, rows]."""
    return model(
        input_ids=torch.as_tensor(np.asarray(token))[None],
        position_ids=torch.as_tensor(np.asarray(position))[None],
        attention_mask=torch.as_tensor(np.asarray(mask))[None, None],
        use_cache=False,
    ).logits[0]


def row_nll(model: torch.nn.Module, rows: Rows) -> Tensor:
    """nll of the labelled rows, under the dense mask of the rows; no token excluded."""
    scores = logits(model, rows.token, rows.position, rows.dense_mask())[rows.labelled]
    return torch.nn.functional.cross_entropy(scores, torch.as_tensor(rows.label[rows.labelled]), reduction="none")


def row_loss(model: torch.nn.Module, rows: Rows) -> Tensor:
    """sum(weight * nll), not divided by the count."""
    return (row_nll(model, rows) * torch.as_tensor(rows.weight[rows.labelled])).sum()
