"""Chunked linear cross-entropy against whole logits and autograd."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels import plain
from unmask.kernels import Head

ROWS, WIDTH, VOCABULARY = 23, 12, 37


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    label: Tensor
    loss_weight: Tensor
    bias: Tensor


def inputs(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    label = torch.randint(1, VOCABULARY, (rows,), generator=generator)
    loss_weight = torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype) * 3
    return Inputs(leaf(rows, WIDTH), leaf(VOCABULARY, WIDTH), label, loss_weight, leaf(VOCABULARY))


def public(
    hidden: Tensor, weight: Tensor, label: Tensor, loss_weight: Tensor, exclude: int | None = None, **more: Any
) -> tuple[Tensor, Tensor]:
    return Head(weight, **more).cross_entropy(hidden, label, loss_weight, exclude)


def chunked(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    import sys

    monkeypatch.setattr(sys.modules["unmask.kernels.linear_cross_entropy"], "CHUNK", size)


@pytest.mark.parametrize("chunk", [1, 5, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("softcap", "exclude"), [(None, None), (5.0, None), (None, 0), (5.0, 0)])
def test_any_chunk_size_equals_whole_logits(
    monkeypatch: pytest.MonkeyPatch, chunk: int, bias: bool, softcap: float | None, exclude: int | None
) -> None:
    chunked(monkeypatch, chunk)
    for dtype, loss_tolerance, grad_tolerance in ((torch.float64, 1e-12, 1e-12), (torch.float32, 2e-5, 3e-5)):
        given = inputs(dtype)
        leaves = [given.hidden, given.weight, *([given.bias] if bias else [])]
        options = {"bias": given.bias if bias else None, "softcap": softcap, "exclude": exclude}
        got, nll = public(*given[:4], **options)
        expected, expected_nll = plain.linear_cross_entropy(*given[:4], **options)
        torch.testing.assert_close(got, expected, rtol=loss_tolerance, atol=loss_tolerance)
        torch.testing.assert_close(nll, expected_nll, rtol=loss_tolerance, atol=loss_tolerance)
        assert not nll.requires_grad
        head = Head(given.weight, options["bias"], softcap)
        log_probs = head.log_probs(given.hidden, given.label, exclude)
        logits = head.logits(given.hidden, exclude)
        losses = torch.nn.functional.cross_entropy(logits, given.label, reduction="none")
        torch.testing.assert_close(-log_probs, expected_nll, rtol=loss_tolerance, atol=loss_tolerance)
        ways = {
            "sum": torch.autograd.grad(got * 1.7, leaves),
            "log-probabilities": torch.autograd.grad(log_probs, leaves, -1.7 * given.loss_weight),
            "logits": torch.autograd.grad(losses, leaves, 1.7 * given.loss_weight),
        }
        expected_grads = torch.autograd.grad(expected * 1.7, leaves)
        for name, grads in ways.items():
            for a, b in zip(grads, expected_grads, strict=True):
                assert a.dtype == dtype
                torch.testing.assert_close(a, b, rtol=grad_tolerance, atol=grad_tolerance, msg=name)


def test_the_reference_is_the_formula() -> None:
    """Row by row: log sum exp of the logits that are not excluded, minus the label's."""
    given = inputs()
    total, nll = plain.linear_cross_entropy(*given[:4], bias=given.bias, softcap=5.0, exclude=0)
    expected = []
    for h, label in zip(given.hidden.tolist(), given.label.tolist(), strict=True):
        logits = [
            5.0 * math.tanh((sum(x * y for x, y in zip(h, w, strict=True)) + b) / 5.0)
            for w, b in zip(given.weight.tolist(), given.bias.tolist(), strict=True)
        ]
        expected.append(math.log(sum(math.exp(z) for z in logits[1:])) - logits[label])
    assert nll.tolist() == pytest.approx(expected, rel=1e-12)
    weighted = sum(w * x for w, x in zip(given.loss_weight.tolist(), expected, strict=True))
    assert float(total.detach()) == pytest.approx(weighted, rel=1e-12)


@pytest.mark.parametrize(("softcap", "exclude"), [(None, None), (3.0, 0)])
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, softcap: float | None, exclude: int | None) -> None:
    chunked(monkeypatch, 2)
    given = inputs(rows=5)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return public(hidden, weight, given.label, given.loss_weight, bias=bias, softcap=softcap, exclude=exclude)[0]

    def ratio(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return Head(weight, bias, softcap).log_probs(hidden, given.label, exclude).exp().sum()

    assert torch.autograd.gradcheck(ratio, (given.hidden, given.weight, given.bias))
    assert torch.autograd.gradcheck(loss, (given.hidden, given.weight, given.bias))


def test_autocast_multiplies_in_bf16_and_sums_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch, 7)
    given = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, nll = public(*given[:4], bias=given.bias)
    assert got.dtype == nll.dtype == torch.float32
    leaves = given.hidden, given.weight, given.bias
    expected, _ = plain.linear_cross_entropy(*given[:4], bias=given.bias)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=0)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).abs().max() / b.abs().max()) < 2e-2


def test_bf16_parameters_get_bf16_gradients() -> None:
    given = inputs(torch.bfloat16)
    wide = inputs(torch.float64)
    wide = Inputs(*(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given))
    got, nll = public(*given[:4], bias=given.bias)
    assert nll.dtype == torch.float32
    expected, _ = plain.linear_cross_entropy(*wide[:4], bias=wide.bias)
    leaves, wide_leaves = (given.hidden, given.weight, given.bias), (wide.hidden, wide.weight, wide.bias)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, wide_leaves), strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - b).abs().max() / b.abs().max()) < 3e-2


def test_only_wanted_gradients_are_formed_and_rows_may_be_none() -> None:
    given = inputs()
    full = torch.autograd.grad(public(*given[:4])[0], (given.hidden, given.weight))
    frozen_head = public(given.hidden, given.weight.detach(), *given[2:4])[0]
    torch.testing.assert_close(torch.autograd.grad(frozen_head, given.hidden)[0], full[0])
    frozen_body = public(given.hidden.detach(), given.weight, *given[2:4])[0]
    torch.testing.assert_close(torch.autograd.grad(frozen_body, given.weight)[0], full[1])
    with torch.no_grad():
        assert not public(*given[:4])[0].requires_grad
    empty = inputs(rows=0)
    total, nll = public(*empty[:4])
    assert float(total.detach()) == 0.0 and nll.shape == (0,)
    dh, dw = torch.autograd.grad(total, (empty.hidden, empty.weight))
    assert dh.shape == (0, WIDTH) and torch.equal(dw, torch.zeros_like(dw))
    dh, dw = torch.autograd.grad(
        Head(empty.weight).log_probs(empty.hidden, empty.label).sum(), (empty.hidden, empty.weight)
    )
    assert dh.shape == (0, WIDTH) and torch.equal(dw, torch.zeros_like(dw))


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of rows x vocabulary is born, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, Tensor):
                    sizes.append(x.numel())
            return result

    chunked(monkeypatch, 4)
    given = inputs(rows=200)
    with Sizes():
        total, _ = public(*given[:4])
        total.backward()
        Head(given.weight).log_probs(given.hidden, given.label).exp().sum().backward()
    assert max(sizes) <= max(200 * WIDTH, VOCABULARY * WIDTH)
