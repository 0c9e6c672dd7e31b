"""attend, forward and backward, against a dense softmax in fp64 that autograd differentiates."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.dense import Tensors, differentiate, diffusion, random_tensors, softmax_attention
from tests.rows.brute import WINDOWS, Described, Row, built, packs, pair_mask
from unmask.attention import Plan, attend
from unmask.attention.attend import attend_backward
from unmask.attention.tiles import merge
from unmask.rows import Rows

HEADS = [(4, 2), (4, 1), (2, 2)]
SCALE = 0.3


def results(rows: Rows, given: Tensors, backend: str, window: int | None = None, labelled: bool = False) -> list:
    """out and the gradients through attend."""
    plan = Plan.from_rows(rows, (window,), backend=backend, labelled_window=window if labelled else "none")
    out, lse = attend(*given[:3], plan.handle(window, labelled), SCALE)
    assert not lse.requires_grad
    assert out.transpose(1, 2).is_contiguous(), "not laid out like transformers' activations"
    return differentiate(out, given)


def dense(given: Tensors, mask: np.ndarray) -> list:
    """out and the gradients through the definition, in fp64."""
    wide = Tensors(*(x.detach().double() for x in given))
    leaves = Tensors(*(x.requires_grad_() for x in wide[:3]), wide.grad)
    return differentiate(softmax_attention(*leaves[:3], torch.from_numpy(mask), SCALE)[0], leaves)


def relative(got: list, expected: list) -> float:
    """Largest difference: of out by its own largest entry, of the gradients by the largest of the three.

    One row alone has dq = 0 but for rounding, so dq has no size of its own.
    """
    sizes = [float(x.abs().max()) for x in expected]
    sizes[1:] = [max(sizes[1:])] * 3
    differences = [float((a.double() - b).abs().max()) for a, b in zip(got, expected, strict=True)]
    return max(difference / max(size, 1e-3) for difference, size in zip(differences, sizes, strict=True))


@settings(max_examples=40)
@given(packs(), WINDOWS, st.sampled_from(HEADS), st.sampled_from(["tiles", "reference"]))
def test_any_rows_in_fp64(pack: list[Described], window: int | None, heads: tuple[int, int], backend: str) -> None:
    rows = built(pack)
    if not len(rows):
        return
    given = random_tensors(len(rows), len(rows), heads)
    assert relative(results(rows, given, backend, window), dense(given, pair_mask(rows, window))) < 1e-12


@settings(max_examples=40)
@given(packs(), WINDOWS, st.sampled_from(HEADS), st.sampled_from(["tiles", "reference"]))
def test_labelled_queries_only(pack: list[Described], window: int | None, heads: tuple[int, int], backend: str) -> None:
    rows = built(pack)
    if not len(rows.labelled):
        return
    given = random_tensors(len(rows.labelled), len(rows), heads)
    mask = pair_mask(rows, window)[rows.labelled]
    assert relative(results(rows, given, backend, window, labelled=True), dense(given, mask)) < 1e-12


@pytest.mark.parametrize(
    ("lengths", "size", "draws", "window"),
    [([330, 41, 140], 32, 1, None), ([90] * 4, 7, 2, None), ([310], 16, 3, 100), ([50, 1, 150, 33], 64, 2, 40)],
)
def test_packs_of_many_tiles(lengths: list[int], size: int, draws: int, window: int | None) -> None:
    """The same inputs, exact in every dtype, against one reference."""
    rows = diffusion(lengths, size, draws)
    inputs = [x.detach() for x in random_tensors(len(rows), len(rows), (4, 2), torch.bfloat16)]
    expected = dense(Tensors(*inputs), rows.dense_mask(window))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        q, k, v, grad = (x.to(dtype) for x in inputs)
        got = results(rows, Tensors(*(x.requires_grad_() for x in (q, k, v)), grad), "tiles", window)
        assert all(x.dtype == dtype for x in got)
        assert relative(got, expected) < tolerance


@pytest.mark.parametrize("backend", ["tiles", "reference"])
def test_the_lse_is_that_of_the_attended_scores(backend: str) -> None:
    rows = diffusion([100, 30], 8, 2)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        given = random_tensors(len(rows), len(rows), (4, 2), dtype)
        plan = Plan.from_rows(rows, backend=backend)
        lse = attend(*given[:3], plan.handle(None), SCALE)[1]
        wide = [x.detach().double() for x in given[:3]]
        expected = softmax_attention(*wide, torch.from_numpy(rows.dense_mask()), SCALE)[1]
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(lse.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["tiles", "reference"])
def test_rows_that_see_nothing_give_and_take_nothing(backend: str, dtype: torch.dtype) -> None:
    """A clean row with an empty interval, one noisy row of reach 0 in a block, and a whole block of reach 0."""
    clean = [Row(0, 0, 1, True), Row(1, 1, 1, True), Row(2, 0, 3, True)]
    blocks = [[Row(3, 0, 0, True, 0), Row(4, 0, 0, True, 2)], [Row(5, 0, 0, True, 0), Row(6, 0, 0, True, 0)]]
    rows = built([Described(clean, blocks)])
    empty = [r for r, token in enumerate(rows.token) if token in (1, 3, 5, 6)]
    given = random_tensors(len(rows), len(rows), (4, 2), dtype)
    plan = Plan.from_rows(rows, backend=backend)
    out, lse = attend(*given[:3], plan.handle(None), SCALE)
    out, dq, dk, dv = differentiate(out, given)
    assert torch.equal(out[:, :, empty], torch.zeros_like(out[:, :, empty]))
    assert torch.equal(dq[:, :, empty], torch.zeros_like(dq[:, :, empty]))
    assert (lse[:, :, empty] == float("-inf")).all() and lse[:, :, [0]].isfinite().all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert torch.equal(dk[:, :, [5, 6]], torch.zeros_like(dk[:, :, [5, 6]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_partial_results_does_not_depend_on_their_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(5):
        lse = torch.randn((1, 2, 40), generator=generator, dtype=dtype) * 8
        lse[torch.rand(lse.shape, generator=generator) < 0.3] = float("-inf")
        parts.append((torch.randn((1, 2, 40, 8), generator=generator, dtype=dtype), lse))
    parts = [(out.masked_fill((lse == float("-inf"))[..., None], 0.0), lse) for out, lse in parts]
    weight = torch.softmax(torch.stack([lse for _, lse in parts]).double(), 0).nan_to_num(0.0)
    expected = (torch.stack([out for out, _ in parts]).double() * weight[..., None]).sum(0)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        out, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], float("-inf"))
        for i in order:
            out, lse = merge(out, lse, *parts[i])
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
        total = torch.logsumexp(torch.stack([lse for _, lse in parts]).double(), 0)
        torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)


def test_only_what_needs_a_gradient_gets_one() -> None:
    rows = diffusion([20], 4)
    plan = Plan.from_rows(rows)
    given = random_tensors(len(rows), len(rows), (2, 2))
    frozen = [x.detach() for x in given[:3]]
    out, _ = attend(frozen[0], given.k, frozen[2], plan.handle(None), SCALE)
    (dk,) = torch.autograd.grad(out, (given.k,), given.grad)
    torch.testing.assert_close(dk, results(rows, given, "tiles")[2])
    assert not attend(*frozen, plan.handle(None), SCALE)[0].requires_grad


def test_a_freed_plan_is_named() -> None:
    rows = diffusion([20], 4)
    given = random_tensors(len(rows), len(rows), (2, 2))
    plan = Plan.from_rows(rows)
    handle = plan.handle(None)
    out, _ = attend(*given[:3], handle, SCALE)
    del plan
    gc.collect()
    with pytest.raises(RuntimeError, match="the Plan of this pack was freed; keep it alive until backward has ended"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="the Plan of this pack was freed"):
        attend(*given[:3], handle, SCALE)


@pytest.mark.parametrize("backend", ["tiles", "reference"])
def test_sizes_that_do_not_fit_the_plan_are_refused(backend: str) -> None:
    rows = diffusion([20], 4)
    n = len(rows)
    plan = Plan.from_rows(rows, backend=backend)
    for queries, keys in ((n - 1, n), (n, n + 1)):
        given = random_tensors(queries, keys, (2, 2))
        sentence = f"{queries} queries and {keys} keys do not fit a plan of {n} queries and {n} keys"
        with pytest.raises(RuntimeError, match=sentence):
            attend(*given[:3], plan.handle(None), SCALE)


def test_a_window_the_plan_was_not_made_for_is_an_error() -> None:
    with pytest.raises(KeyError):
        Plan.from_rows(diffusion([20], 4), (None, 8)).handle(4)


@pytest.mark.parametrize("backend", ["tiles", "reference"])
@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, "rows"), (torch.float64, "heads")])
def test_both_operators_pass_opcheck(backend: str, dtype: torch.dtype, layout: str) -> None:
    rows = diffusion([20, 7], 4)
    plan = Plan.from_rows(rows, backend=backend)
    given = random_tensors(len(rows), len(rows), (4, 2), dtype)
    if layout == "heads":
        given = Tensors(*(x.detach().contiguous().requires_grad_() for x in given[:3]), given.grad.contiguous())
    torch.library.opcheck(attend, (*given[:3], plan.handle(None), SCALE))
    out, lse = attend(*(x.detach() for x in given[:3]), plan.handle(None), SCALE)
    saved = [*(x.detach() for x in given[:3]), out, lse]
    torch.library.opcheck(attend_backward, (given.grad, saved, plan.handle(None), SCALE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fake_tensors_have_the_real_strides(dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = diffusion([20], 4)
    plan = Plan.from_rows(rows)
    for layout in (torch.contiguous_format, None):
        given = [x.detach() for x in random_tensors(len(rows), len(rows), (4, 2), dtype)]
        given = [x.contiguous() if layout else x for x in given]
        *tensors, grad = given
        real = attend(*tensors, plan.handle(None), SCALE)
        real_grads = attend_backward(grad, [*tensors, *real], plan.handle(None), SCALE)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in (*tensors, plan.handle(None), grad)]
            *fake_tensors, handle, fake_grad = fakes
            fake = attend(*fake_tensors, handle, SCALE)
            fake_grads = attend_backward(fake_grad, [*fake_tensors, *fake], handle, SCALE)
        for a, b in zip((*real, *real_grads), (*fake, *fake_grads), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
