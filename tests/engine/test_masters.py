"""Parameters in half precision learn as in fp32: what their masters are, where they are kept, and what they take."""

import pytest
import torch

from tests.planning.test_footprint import bytes_of, prepared
from tests.training.tiny import losses, stop_at, train, weights
from unmask.config import OptimizerConfig
from unmask.engine.optim import masters, optimizers
from unmask.engine.optim.masters import MASTER, Mastered
from unmask.planning.footprint import footprint
from unmask.runs.open import open_model

#: At this rate an update of a weight above 0.04 is less than half the distance of two numbers in bf16.
SLOW = OptimizerConfig(learning_rate=1e-5, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_that_round_away_add_up_in_the_master(dtype):
    """200 steps of torch's AdamW in fp32 from the same start, with the same gradients: the master to the bit."""
    generator = torch.Generator().manual_seed(0)
    rounded, exact = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    rounded.weight.data = torch.empty(8, 8).uniform_(0.5, 1, generator=generator).to(dtype)
    exact.weight.data = rounded.weight.detach().float()
    before = rounded.weight.detach().clone()
    optimizer = optimizers.build(rounded, SLOW)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-5, betas=SLOW.betas, weight_decay=0.1, fused=True)
    alone = torch.nn.Parameter(before.clone())
    without = torch.optim.AdamW([alone], lr=1e-5, betas=SLOW.betas, weight_decay=0.1)
    for _ in range(200):
        gradient = torch.rand(8, 8, generator=generator).to(dtype)
        rounded.weight.grad, exact.weight.grad, alone.grad = gradient, gradient.float(), gradient.clone()
        for each in (optimizer, reference, without):
            each.step()
    assert torch.equal(alone, before)  # every single update was lost
    assert torch.equal(optimizer.state[rounded.weight][MASTER], exact.weight)
    assert torch.equal(rounded.weight, exact.weight.to(dtype)) and not torch.equal(rounded.weight, before)
    assert optimizer.state[rounded.weight]["exp_avg"].dtype == torch.float32
    assert rounded.weight.grad is gradient


def test_parameters_in_full_precision_beside_them_are_updated_once(monkeypatch):
    """Where updates are made in parts, too."""
    monkeypatch.setattr(masters, "CHUNK", 10)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    model[1].to(torch.bfloat16)
    plain = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    plain.load_state_dict(model.state_dict())
    config = OptimizerConfig(learning_rate=0.01)
    ours, theirs = optimizers.build(model, config), optimizers.build(plain, config)
    for step in range(3):
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            own.grad = torch.full_like(own, 2.0**-step)
            other.grad = own.grad.float()
        ours.step()
        theirs.step()
    assert isinstance(ours, Mastered) and len(ours.masters) == 2
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other.to(own.dtype))


def test_muon_in_bf16_follows_muon_in_fp32():
    config = OptimizerConfig(name="muon", learning_rate=1e-4, ns_steps=3)
    half, full = (
        torch.nn.Sequential(torch.nn.Linear(6, 6)).to(torch.bfloat16),
        torch.nn.Sequential(torch.nn.Linear(6, 6)),
    )
    full.load_state_dict(half.state_dict())
    ours, theirs = optimizers.build(half, config), optimizers.build(full, config)
    for step in range(20):
        for own, other in zip(half.parameters(), full.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            other.grad = own.grad.float()
        ours.step()
        theirs.step()
    for own, other in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours.state[own][MASTER], other)


@pytest.mark.parametrize("options", [[], ["optimizer.name=muon", "training.ema=0.5"], ["optimizer.state=8bit"]])
def test_a_run_in_bf16_goes_on_to_the_bit(options, tmp_path):
    said = []
    settings = ["model.dtype=bfloat16", "training.steps=6", "optimizer.learning_rate=1e-4", *options]
    once = train(tmp_path / "once", *settings)
    train(tmp_path / "twice", *settings, callbacks=[stop_at(3)])
    twice = train(tmp_path / "twice", *settings, callbacks=[lambda trainer, _: said.extend(trainer.run.notes())])
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    assert all(torch.equal(weight, weights(once)[name]) for name, weight in weights(twice).items())
    assert any(note.startswith("model.dtype=bfloat16: the optimiser updates a copy") for note in said)
    for parameter, master in once.engine.optimizer.masters.items():
        assert master.dtype == torch.float32 and torch.equal(parameter, master.bfloat16())
    assert any(not torch.equal(master, each.float()) for each, master in once.engine.optimizer.masters.items())


def test_averages_are_of_the_masters(tmp_path):
    """decay_s = min(0.2, (1 + s) / (10 + s)) of what the masters were after each update."""
    seen = []

    def see(trainer, record):
        seen.append({id(each): master.clone() for each, master in trainer.engine.optimizer.masters.items()})

    trainer = train(tmp_path, "model.dtype=bfloat16", "training.ema=0.2", "training.steps=3", callbacks=[see])
    start = train(tmp_path / "start", "model.dtype=bfloat16", "training.steps=1", "optimizer.learning_rate=1e-30")
    for name, parameter in trainer.run.model.named_parameters():
        expected = weights(start)[name].float()
        for step, values in enumerate(seen):
            decay = min(0.2, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * values[id(parameter)]
        torch.testing.assert_close(trainer.engine.ema.average[name], expected, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_without_masters_gives_its_weights(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(masters, "HALF", ())
        train(tmp_path, "model.dtype=bfloat16", "training.steps=6", callbacks=[stop_at(2)])
    before = dict(open_model(tmp_path).model.named_parameters())

    def see(trainer, record):
        if record["step"] == 3:  # of a learning rate so small that a master stays what it was
            for name, parameter in trainer.run.model.named_parameters():
                torch.testing.assert_close(
                    trainer.engine.optimizer.masters[parameter], before[name].float(), rtol=0, atol=1e-9
                )

    train(tmp_path, "model.dtype=bfloat16", "training.steps=6", "optimizer.learning_rate=1e-12", callbacks=[see])


def test_masters_are_foretold_to_the_byte(tmp_path):
    run, micro = prepared(tmp_path, "model.dtype=bfloat16")
    weights, buffers = bytes_of(run.model.parameters()), bytes_of(run.model.buffers())
    found = footprint(run, micro)
    assert (found.parameters, found.gradients, found.optimizer) == (weights + buffers, weights, 3 * 2 * weights)
