"""The FlexAttention backend: its block mask, and its forward as CPUs can run it (backward is for GPUs only)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention.dense import diffusion, random_tensors, softmax_attention
from unmask.attention import Pattern, Plan, attend
from unmask.attention.flex import BLOCK, block_mask
from unmask.errors import UserError


@pytest.mark.parametrize(
    ("lengths", "size", "draws", "window"), [([330, 41], 32, 1, None), ([90] * 4, 7, 2, None), ([310], 16, 2, 100)]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("labelled", [False, True])
def test_block_mask_and_forward(lengths: list[int], size: int, draws: int, window: int | None, labelled: bool) -> None:
    rows = diffusion(lengths, size, draws)
    dense = rows.dense_mask(window)
    dense = dense[rows.labelled] if labelled else dense
    pattern = Pattern(rows, window, rows.labelled if labelled else None, "flex", torch.device("cpu"))

    mask = block_mask(pattern)
    high, wide = (-(-n // BLOCK) for n in dense.shape)
    padded = np.zeros((high * BLOCK, wide * BLOCK), bool)
    padded[: dense.shape[0], : dense.shape[1]] = dense
    cells = padded.reshape(high, BLOCK, wide, BLOCK)
    touched = cells.any((1, 3))
    real_rows = np.arange(high * BLOCK).reshape(high, BLOCK, 1, 1) < dense.shape[0]
    full = (cells | ~real_rows).all((1, 3))
    assert np.array_equal(_chosen(mask.full_kv_num_blocks, mask.full_kv_indices, wide), full)
    assert np.array_equal(_chosen(mask.kv_num_blocks, mask.kv_indices, wide), touched & ~full)

    given = random_tensors(len(dense), len(rows), (4, 2), torch.float32)
    q, k, v = (x.detach() for x in given[:3])
    out, lse = attend(q, k, v, pattern.handle, 0.3)
    expected, expected_lse = softmax_attention(q.double(), k.double(), v.double(), torch.from_numpy(dense), 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=5e-6)


def test_training_with_it_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="model.attention=flex: FlexAttention has no backward on CPU; use tiles"):
        Plan.from_rows(diffusion([20], 4), backend="flex")


def _chosen(count: torch.Tensor, index: torch.Tensor, wide: int) -> np.ndarray:
    chosen = np.zeros((count.shape[-1], wide), bool)
    for row, n in enumerate(count[0, 0].tolist()):
        chosen[row, index[0, 0, row, :n].tolist()] = True
    return chosen
