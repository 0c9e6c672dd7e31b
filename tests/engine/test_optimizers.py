"""Which parameters are decayed, and every optimiser against its formula."""

import pytest
import torch
from torch import nn

from tests.training.tiny import documents, log, losses, stop_at, train, weights
from unmask.config import OptimizerConfig
from unmask.engine.optim import optimizers
from unmask.errors import UserError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Untied(Tied):
    """Also a head of its own, and stacked matrices as experts have them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5)
        self.experts = nn.Parameter(torch.zeros(2, 3, 3))

    def get_output_embeddings(self):
        return self.head


def test_only_matrices_are_decayed():
    model = Tied()
    decayed, kept = optimizers.groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [id(model.linear.weight)]
    assert {id(p) for p in kept["params"]} == {
        id(model.embed.weight),
        id(model.norm.weight),
        id(model.norm.bias),
        id(model.linear.bias),
    }


def test_heads_and_experts_are_decayed_but_no_hidden_matrices():
    model = Untied()
    hidden, experts, decayed, kept = found = optimizers.groups(model, 0.1)
    assert [group["role"] for group in found] == ["hidden", "experts", "decayed", "kept"]
    assert [id(p) for p in hidden["params"]] == [id(model.linear.weight)]
    assert [id(p) for p in experts["params"]] == [id(model.experts)]
    assert [id(p) for p in decayed["params"]] == [id(model.head.weight)]
    assert experts["weight_decay"] == decayed["weight_decay"] == 0.1 and id(model.head.bias) in {
        id(p) for p in kept["params"]
    }


def test_a_first_update_is_the_sign_of_the_gradient_after_decay():
    model = nn.Linear(2, 2).double()
    before = model.weight.detach().clone()
    optimizer = optimizers.build(model, OptimizerConfig(learning_rate=0.01, weight_decay=0.5, eps=1e-30))
    gradient = torch.tensor([[1.0, -2.0], [3.0, -4.0]], dtype=torch.float64)
    model.weight.grad = gradient
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.01 * 0.5) - 0.01 * gradient.sign())
    assert optimizer.defaults["fused"]


def test_a_third_party_adds_one_by_name():
    optimizers.optimizers.add("sgd", lambda parameters, config: torch.optim.SGD(parameters, lr=config.learning_rate))
    built = optimizers.build(nn.Linear(2, 2), OptimizerConfig(name="sgd"))
    assert isinstance(built, torch.optim.SGD)


def newton_schulz(update, steps, dtype):
    """Jordan's quintic iteration, written out."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.to(dtype)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).to(update.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_is_its_formula(dtype, nesterov, adjust, shape):
    """Three updates of a matrix by Muon, of its bias by AdamW. torch iterates in bf16, which moves
    an update by up to 5 % of its size."""
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0]).double()
    expected, momentum = model.weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    config = OptimizerConfig(name="muon", learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.5, momentum=0.9,
                             nesterov=nesterov, ns_steps=5, adjust_lr=adjust)  # fmt: skip
    optimizer = optimizers.build(model, config)
    alone = nn.Linear(shape[1], shape[0]).double()
    alone.load_state_dict(model.state_dict())
    adamw = torch.optim.AdamW([alone.bias], lr=0.01, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True)
    rows, columns = shape
    scale = 0.2 * max(rows, columns) ** 0.5 if adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    for _ in range(3):
        gradient = torch.randn(shape, dtype=torch.float64)
        model.weight.grad, model.bias.grad = gradient.clone(), torch.randn(rows, dtype=torch.float64)
        alone.bias.grad = model.bias.grad.clone()
        momentum = 0.9 * momentum + 0.1 * gradient
        update = 0.9 * momentum + 0.1 * gradient if nesterov else momentum
        orthogonal = newton_schulz(update.to(dtype), 5, dtype).double()
        singular = torch.linalg.svdvals(orthogonal)
        assert 0.3 < singular.min() and singular.max() < 1.3  # near U V^T
        expected = expected * (1 - 0.02 * 0.5) - 0.02 * scale * orthogonal
        optimizer.step()
        adamw.step()
        error = (model.weight.detach() - expected).norm() / (0.02 * scale * orthogonal.norm())
        assert error < 0.05
        expected = model.weight.detach().clone()  # each update on its own: bf16's errors do not add up
    assert torch.equal(model.bias, alone.bias)


def test_an_update_of_muon_has_the_size_of_one_of_adamw():
    """With match_rms_adamw its root mean square is 0.2 times the rate, whatever the shape (Moonlight)."""
    for shape in ((64, 64), (32, 128), (128, 32)):
        torch.manual_seed(1)
        model = nn.Linear(shape[1], shape[0], bias=False)
        before = model.weight.detach().clone()
        optimizer = optimizers.build(model, OptimizerConfig(name="muon", learning_rate=1.0, weight_decay=0))
        model.weight.grad = torch.randn(shape)
        optimizer.step()
        assert float((model.weight.detach() - before).square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_muon_needs_a_matrix():
    with pytest.raises(UserError, match="optimizer.name=muon: the model has no matrix inside of its layers"):
        optimizers.build(nn.LayerNorm(3), OptimizerConfig(name="muon"))


MUON = ["optimizer.name=muon", "optimizer.muon_learning_rate=0.02", "training.steps=6"]


def test_muon_trains_and_resumes_bit_for_bit(tmp_path):
    whole = train(tmp_path / "whole", *MUON)
    train(tmp_path / "halves", *MUON, callbacks=[stop_at(3)])
    rest = train(tmp_path / "halves", *MUON)
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(rest)[name]), name
    hidden, kept = whole.engine.optimizer.param_groups
    assert all(
        "momentum_buffer" in rest.engine.optimizer.state[p] for p in rest.engine.optimizer.param_groups[0]["params"]
    )
    assert all("exp_avg_sq" in rest.engine.optimizer.state[p] for p in rest.engine.optimizer.param_groups[1]["params"])
    assert hidden["lr"] / kept["lr"] == pytest.approx(0.02 / 0.003)
    last = log(tmp_path / "whole")[-1]
    assert last["muon_learning_rate"] / last["learning_rate"] == pytest.approx(0.02 / 0.003)


def test_a_model_learns_with_muon(tmp_path):
    data = [{"input_ids": [token] * 64} for token in range(8)]
    options = ["optimizer.name=muon", "optimizer.learning_rate=0.01", "training.steps=60"]
    train(tmp_path, *options, data=data)
    first, last = log(tmp_path)[0], log(tmp_path)[-1]
    assert first["nll"] > 3.5 and last["nll"] < 1.0


def test_the_config_of_a_resumed_run_counts(tmp_path):
    """A rate, a decay or a momentum that was changed is the new one, not the checkpoint's."""
    train(tmp_path, *MUON, "schedule.name=constant", callbacks=[stop_at(3)], data=documents())
    changed = ["optimizer.weight_decay=0.3", "optimizer.betas=[0.5, 0.6]", "optimizer.momentum=0.7"]
    rest = train(tmp_path, *MUON, "schedule.name=constant", *changed, "optimizer.muon_learning_rate=0.01")
    hidden, kept = rest.engine.optimizer.param_groups
    assert (hidden["lr"], hidden["weight_decay"], hidden["momentum"]) == (0.01, 0.3, 0.7)
    assert (kept["betas"], kept["weight_decay"]) == ((0.5, 0.6), 0.0)
