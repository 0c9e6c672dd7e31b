"""RMSNorm and SwiGLU against their references, transformers' own modules, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import plain
from unmask.kernels import chunks, rms_norm, swiglu_down

DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.fixture(autouse=True, params=[2**17, 40], ids=["whole", "chunks"])
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with its rows in one piece and in pieces of two or more, the last one shorter."""
    monkeypatch.setattr(chunks, "ELEMENTS", request.param)


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def compare(got: Tensor, expected: Tensor, given: list[Tensor], tolerance: float) -> None:
    """Value and gradients, each by the largest entry of what is expected."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(got.shape, generator=generator, dtype=torch.float64).to(got.dtype)
    pairs = [(got, expected)]
    pairs += zip(torch.autograd.grad(got, given, grad), torch.autograd.grad(expected, given, grad), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert float((a.double() - b.double()).detach().abs().max()) <= tolerance * float(b.detach().abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 16), (5, 16), (2, 3, 4, 16)])
def test_rms_norm_equals_its_reference(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    given = leaves(dtype, shape, (16,))
    compare(rms_norm(*given, 1e-6), plain.rms_norm(*given, 1e-6), given, tolerance)


def test_rms_norm_takes_half_precision_activations_and_fp32_weights() -> None:
    """What autocast leaves: the result is promoted, as transformers' is."""
    (x,), (weight,) = leaves(torch.bfloat16, (5, 16)), leaves(torch.float32, (16,))
    compare(rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6), [x, weight], 2e-2)


def test_rms_norm_by_the_formula_and_by_finite_differences() -> None:
    given = leaves(torch.float64, (4, 6), (6,))
    x, weight = given
    expected = weight * x / torch.sqrt((x * x).sum(-1, keepdim=True) / 6 + 0.3)
    torch.testing.assert_close(rms_norm(x, weight, 0.3), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 0.3), given)


def test_rms_norm_equals_transformers() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for dtype, tolerance in DTYPES[1:]:  # its statistics are fp32 even for fp64
        given = leaves(dtype, (3, 16), (16,))
        module = Qwen3RMSNorm(16, eps=1e-5).to(dtype)
        module.weight.data.copy_(given[1].detach())
        expected = module(given[0].detach())
        torch.testing.assert_close(rms_norm(*given, 1e-5).detach(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5,), (2, 3, 4)])
def test_swiglu_equals_its_reference(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    given = leaves(dtype, (*shape, 16), (*shape, 16), (12, 16))
    compare(swiglu_down(*given), plain.swiglu(*given), given, tolerance)


def test_swiglu_by_the_formula_and_by_finite_differences() -> None:
    given = leaves(torch.float64, (4, 6), (4, 6), (5, 6))
    gate, up, down = given
    expected = (gate / (1 + torch.exp(-gate)) * up) @ down.T
    torch.testing.assert_close(swiglu_down(*given), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(swiglu_down, given)


def test_swiglu_under_autocast_keeps_the_gradient_dtypes() -> None:
    """gate and up arrive in bf16, the parameter stays fp32 and so does its gradient."""
    x, gate, up, down = leaves(torch.float32, (7, 8), (16, 8), (16, 8), (12, 16))
    results = []
    for kernel in (swiglu_down, plain.swiglu):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = kernel(torch.nn.functional.linear(x, gate), torch.nn.functional.linear(x, up), down)
        assert out.dtype == torch.bfloat16
        results.append(torch.autograd.grad(out.float().square().sum(), (x, gate, up, down)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert float((a - b).abs().max() / b.abs().max()) < 2e-2


def _last(x: Tensor) -> Tensor:
    """[width, a, b] -> [b, a, width], a view."""
    return x.permute(2, 1, 0)


def test_inputs_need_not_be_contiguous_and_rows_may_be_none() -> None:
    gate, up, down = leaves(torch.float64, (16, 2, 7), (16, 2, 7), (12, 16))
    given = [gate, up, down]
    compare(swiglu_down(_last(gate), _last(up), down), plain.swiglu(_last(gate), _last(up), down), given, 1e-12)
    (weight,) = leaves(torch.float64, (16,))
    compare(rms_norm(_last(gate), weight, 1e-6), plain.rms_norm(_last(gate), weight, 1e-6), [gate, weight], 1e-12)
    assert rms_norm(_last(gate)[:0], weight, 1e-6).shape == (0, 2, 16)
    assert swiglu_down(_last(gate)[:0], _last(up)[:0], down).shape == (0, 2, 12)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_get_no_gradient(frozen: int) -> None:
    given = leaves(torch.float64, (4, 6), (4, 6), (5, 6))
    full = torch.autograd.grad(swiglu_down(*given).sum(), given)
    some = [x.detach() if i == frozen else x for i, x in enumerate(given)]
    wanted = [i for i in range(3) if i != frozen]
    got = torch.autograd.grad(swiglu_down(*some).sum(), [some[i] for i in wanted])
    assert all(torch.equal(a, full[i]) for a, i in zip(got, wanted, strict=True))
    x, weight = leaves(torch.float64, (4, 6), (6,))
    torch.testing.assert_close(
        torch.autograd.grad(rms_norm(x, weight.detach(), 1e-6).sum(), x),
        torch.autograd.grad(plain.rms_norm(x, weight, 1e-6).sum(), x),
    )
    torch.testing.assert_close(
        torch.autograd.grad(rms_norm(x.detach(), weight, 1e-6).sum(), weight),
        torch.autograd.grad(plain.rms_norm(x, weight, 1e-6).sum(), weight),
    )
