"""Which parameters are decayed, and AdamW against its formula."""

import torch
from torch import nn

from unmask.config import OptimizerConfig
from unmask.training import optimizers


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


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
