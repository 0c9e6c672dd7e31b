"""The rotary embedding against its reference, transformers' own function, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import plain
from unmask.kernels import chunks, rope


def inputs(dtype: torch.dtype, rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """x [1, rows, 3 heads, 8]; angles as transformers makes them, but with halves that differ."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, rows, 3, 8), generator=generator, dtype=torch.float64)
    angle = torch.randn((1, rows, 8), generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("elements", [2**17, 50])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_value_and_gradient_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, elements: int, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(chunks, "ELEMENTS", elements)
    x, cos, sin = inputs(dtype)
    got, expected = rope(x, cos, sin), plain.rope(x, cos, sin)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_finite_differences() -> None:
    x, cos, sin = inputs(torch.float64, rows=2)
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), (x,))


def test_transformers_own_function() -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    x, cos, sin = inputs(torch.float64)
    expected = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0].transpose(1, 2)
    torch.testing.assert_close(rope(x, cos, sin), expected, rtol=1e-12, atol=1e-12)


def test_the_result_may_be_asked_for_in_half_precision() -> None:
    x, cos, sin = inputs(torch.float32)
    got = rope(x, cos, sin, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, plain.rope(x, cos, sin).bfloat16())
    (dx,) = torch.autograd.grad(got, x, torch.ones_like(got))
    assert dx.dtype == torch.float32
