"""attend inside transformers' layers: the plan as a keyword, compilation, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.attention.dense import diffusion
from tests.attention.full import FULL
from unmask.attention import NAME, Plan, register, tiles
from unmask.engine.activations import apply
from unmask.rows import Rows

LAYERS = 3


def tiny(implementation: str = NAME, dtype: torch.dtype = torch.float64) -> Any:
    """A Qwen3 of three layers with the same random weights every time."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    register()
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)


def run(model: Any, rows: Rows, plan: Any, **options: Any) -> Tensor:
    """The last hidden states of a pack, [rows, width]."""
    token, position = (torch.from_numpy(x)[None] for x in (rows.token, rows.position))
    return model.model(input_ids=token, position_ids=position, plan=plan, use_cache=False, **options)[0][0]


def gradients(model: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed random function of the hidden states; the model is left without any."""
    generator = torch.Generator().manual_seed(1)
    (hidden * torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often the tiles ran, forward and backward."""
    count = {"forward": 0, "backward": 0}
    for name in count:
        original = getattr(tiles, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            count[name] += 1
            return original(*args)

        monkeypatch.setattr(tiles, name, counted)
    yield count


def test_a_forward_without_a_plan_is_an_error() -> None:
    model, rows = tiny(), diffusion([12], 4)
    with pytest.raises(RuntimeError, match='attn_implementation="unmask" needs a plan'):
        run(model, rows, None)
    with pytest.raises(RuntimeError, match='load the model with attn_implementation="sdpa"'):
        model(input_ids=torch.from_numpy(rows.token)[None])


def test_denoising_against_a_cache_equals_the_rows_it_was_trained_on() -> None:
    """Prefill clean rows into a DynamicCache, denoise one block with FULL, crop: the noisy rows of a training pack."""
    from transformers import DynamicCache

    model, size = tiny(), 4
    rows = diffusion([12], size)
    hidden = run(model, rows, Plan.from_rows(rows))
    for start in (4, 8):
        of_block = [r for r in range(rows.clean, len(rows)) if rows.hi[r] == start]
        before = list(range(start))
        prefix = diffusion([start], size).take(np.arange(start))
        cache = DynamicCache(config=model.config)
        plan = Plan.from_rows(prefix)
        token, position = (torch.from_numpy(x[before])[None] for x in (rows.token, rows.position))
        model.model(input_ids=token, position_ids=position, plan=plan, cache=cache)
        for _ in range(2):
            token, position = (torch.from_numpy(x[of_block])[None] for x in (rows.token, rows.position))
            got = model.model(input_ids=token, position_ids=position, plan=FULL, cache=cache)[0][0]
            torch.testing.assert_close(got, hidden[of_block])
            cache.crop(-size)


def test_under_autocast_one_dtype_reaches_attend(calls: dict[str, int]) -> None:
    model, rows = tiny(dtype=torch.float32), diffusion([20], 4)
    plan = Plan.from_rows(rows)
    exact = run(model, rows, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = run(model, rows, plan)
    assert calls["forward"] == 2 * LAYERS
    assert float((hidden - exact).detach().abs().max() / exact.detach().abs().max()) < 0.05
    assert all(x.isfinite().all() for x in gradients(model, hidden).values())


@pytest.mark.parametrize(("mode", "forwards"), [("none", 1), ("full", 2), ("selective", 1), ("mlp", 1)])
def test_checkpointing_repeats_attention_only_when_asked(mode: str, forwards: int, calls: dict[str, int]) -> None:
    rows = diffusion([20, 7], 4)
    plan = Plan.from_rows(rows)
    plain = tiny()
    hidden = run(plain, rows, plan)
    expected = gradients(plain, hidden)
    calls.update(forward=0, backward=0)
    model = tiny().train()
    apply(model, mode)
    checkpointed = run(model, rows, plan)
    assert torch.equal(checkpointed, hidden)
    got = gradients(model, checkpointed)
    assert calls == {"forward": forwards * LAYERS, "backward": LAYERS}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("mode", "graphs"), [("none", [1, 1, 1, 2, 2]), ("selective", [1, 1, 1])])
def test_a_compiled_layer_is_one_graph_for_every_plan(mode: str, graphs: list[int]) -> None:
    """The plan is looked up when the graph runs: packs of one size share a graph, other sizes add at most one."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = tiny().train(), tiny().train()
    apply(model, mode)
    model.model.layers[0].compile(fullgraph=True, backend=counter)
    packs = [diffusion([20, 12], 4), diffusion([12, 20], 4), diffusion([32], 4), diffusion([19], 4), diffusion([41], 8)]
    sizes = [len(rows) for rows in packs]
    assert sizes[0] == sizes[1] == sizes[2] and len(set(sizes)) == 3
    counted = []
    for rows in packs[: len(graphs)]:
        plan, other = Plan.from_rows(rows), Plan.from_rows(rows)
        hidden, expected = run(model, rows, plan), run(plain, rows, other)
        torch.testing.assert_close(hidden, expected)
        torch.testing.assert_close(gradients(model, hidden), gradients(plain, expected))
        counted.append(counter.frame_count)
    assert counted == graphs
    torch._dynamo.reset()
