"""AdamW with its means in fewer bits: close to full precision, to the byte as small as foretold, resumed to the bit."""

import numpy as np
import pytest
import torch

from tests.planning.test_footprint import bytes_of, prepared
from tests.training.tiny import losses, stop_at, train, weights
from unmask.config import OptimizerConfig
from unmask.engine.optim.low_precision import BLOCK, Codec, LowPrecisionAdamW, block_of, table
from unmask.errors import UserError
from unmask.planning.footprint import footprint

#: Matrices of 4096 elements at least, the smallest that are kept in blocks.
SIZES = ["model.config.hidden_size=64", "data.pack_tokens=64"]
STATES = ["bf16", "8bit", "4bit"]


def test_tables_are_those_of_dettmers_and_li():
    """Entries of bitsandbytes' create_dynamic_map and of lpmm's maps."""
    for bits, signed in ((8, True), (8, False), (4, True), (4, False)):
        entries = table(bits, signed)
        assert len(entries) == 2**bits and (entries.diff() > 0).all() and entries[-1] == 1
    torch.testing.assert_close(table(8, True)[[0, 127, 128, 254]], torch.tensor([-0.99296875, 0, 5.5e-7, 0.99296875]))
    torch.testing.assert_close(table(8, False)[[0, 1, 254]], torch.tensor([0.0, 3.25e-7, 0.996484375]))
    expected = [-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0, 0.0055, 0.0325]
    torch.testing.assert_close(table(4, True)[:10], torch.tensor(expected))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_what_is_read_is_the_nearest_entry_times_the_scale(bits, signed):
    block, generator = BLOCK[bits], torch.Generator().manual_seed(0)
    values = torch.randn(6, 4 * block, generator=generator) * torch.logspace(-3, 0, 4 * block)
    values = values if signed else values.square()
    values[0, :block] = 0
    codec, codes = Codec(bits), torch.zeros(6, values.shape[1] * bits // 8, dtype=torch.uint8)
    scale = torch.zeros(6, 4)
    codec.write(values, codes, scale, signed)
    largest = values.unflatten(1, (4, block)).abs().amax(2)
    assert torch.equal(scale, largest)
    scales = largest.repeat_interleave(block, 1)
    nearest = (values[..., None] / scales[..., None].clamp(min=1e-30) - table(bits, signed)).abs().argmin(-1)
    torch.testing.assert_close(codec.read(codes, scale, signed), table(bits, signed)[nearest] * scales)


def test_a_step_is_adamw_s(tmp_path):
    """Of a tensor too small for blocks, for which nothing is rounded; two steps, with decay."""
    config = OptimizerConfig(state="8bit", learning_rate=0.01)
    start, gradients = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 2, 5, dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    group = {"weight_decay": 0.1}
    optimizer = LowPrecisionAdamW([{"params": [ours], **group}], config)
    reference = torch.optim.AdamW([{"params": [theirs], **group}], lr=0.01, betas=config.betas, eps=config.eps)
    for gradient in gradients:
        for parameter, each in ((ours, optimizer), (theirs, reference)):
            parameter.grad = gradient.clone()
            each.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    path = tmp_path_factory.mktemp("full")
    train(path, *SIZES, "training.steps=30")
    return [loss for _, loss in losses(path)]


@pytest.mark.parametrize("state, close", [("bf16", 0.002), ("8bit", 0.005), ("4bit", 0.03)])
def test_it_learns_as_in_full_precision_and_goes_on_to_the_bit(state, close, full, tmp_path):
    options = [*SIZES, "training.steps=30", f"optimizer.state={state}"]
    once = train(tmp_path / "once", *options)
    assert any(value.dtype in (torch.uint8, torch.bfloat16) for each in once.engine.optimizer.state.values()
               for value in each.values())  # fmt: skip
    found = [loss for _, loss in losses(tmp_path / "once")]
    np.testing.assert_allclose(found[-10:], full[-10:], rtol=close)
    assert found != full
    train(tmp_path / "twice", *options, callbacks=[stop_at(11)])
    twice = train(tmp_path / "twice", *options)
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    assert all(torch.equal(weight, weights(once)[name]) for name, weight in weights(twice).items())
    with pytest.raises(UserError, match=f"optimizer.state=full, but it was {state}"):
        train(tmp_path / "twice", *SIZES, "training.steps=31")


@pytest.mark.parametrize("state", STATES)
def test_it_is_foretold_to_the_byte(state, tmp_path):
    run, micro = prepared(tmp_path, *SIZES, f"optimizer.state={state}")
    foretold = footprint(run, micro).optimizer
    expected = 0
    for parameter in run.model.parameters():
        block, size = 0 if state == "bf16" else block_of(parameter, int(state[0])), parameter.numel()
        each = size * int(state[0]) // 8 + 4 * size // block if block else size * (2 if state == "bf16" else 4)
        expected += 2 * each
    assert foretold == expected <= bytes_of(run.model.parameters())


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (
            ["parallel.model_parallel_size=2", "model.config.intermediate_size=128", "optimizer.state=8bit"],
            "divides rows of 128 elements inside of a block of 128: use bf16",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        prepared(tmp_path, *overrides)
