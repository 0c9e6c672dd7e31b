"""The CUDA path of the rectangles, on fake tensors: every call is well-formed and every shape comes out.

What the kernels compute is checked on a GPU; here it is the arguments, which no CPU run would ever see.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from unmask.attention import flash

N, ROWS, HEADS, WIDTH = 3, 40, 4, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("masked", "keys"), [(False, 56), (True, 56), (True, 64)])
def test_forward_and_backward_on_a_gpu_that_is_not_there(
    dtype: torch.dtype, kv_heads: int, masked: bool, keys: int
) -> None:
    with FakeTensorMode():
        q = torch.empty((N, ROWS, HEADS, WIDTH), device="cuda", dtype=dtype).transpose(1, 2)
        k = torch.empty((N, keys, kv_heads, WIDTH), device="cuda", dtype=dtype).transpose(1, 2)
        v = torch.empty_like(k)
        bias = torch.empty((ROWS, keys), device="cuda", dtype=dtype) if masked else None
        out, lse = flash.forward(q, k, v, bias, 0.25)
        assert out.shape == q.shape and out.dtype == dtype and out.device.type == "cuda"
        assert lse.shape == (N, HEADS, ROWS) and lse.dtype == torch.float32
        # Contiguous, unlike what tiles keeps: Tensor.contiguous() needs a CUDA build even on a fake tensor.
        merged = torch.empty((N, HEADS, ROWS), device="cuda")
        dq, dk, dv = flash.backward(torch.empty_like(q), (q, k, v, out, merged), bias, 0.25)
        assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
        assert dq.dtype == dk.dtype == dv.dtype == dtype


@pytest.mark.parametrize("keys", [1, 15, 16, 17])
def test_the_bias_keeps_its_values_and_gets_aligned_rows(keys: int) -> None:
    bias = torch.randn((5, keys), generator=torch.Generator().manual_seed(0))
    q, k = torch.empty((2, 3, 5, 8)), torch.empty((2, 3, keys, 8))
    aligned = flash._aligned(bias, q, k)
    assert aligned is not None and aligned.shape == (2, 3, 5, keys)
    assert aligned.stride(2) % 16 == 0
    assert all(torch.equal(aligned[n, h], bias) for n in range(2) for h in range(3))
    assert flash._aligned(None, q, k) is None
