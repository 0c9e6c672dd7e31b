"""The losses of routers against transformers' own formula and autograd, and what is said of their experts."""

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.models.families import rows_of, stock, stock_hidden, tiny
from unmask.engine import activations
from unmask.errors import UserError
from unmask.models import RowModel, experts, routing
from unmask.rows import inert

EXPERTS, SLOTS = 4, 2


def logits_of(model, rows):
    """The router logits of every layer of transformers' own model over the rows."""
    caught = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda module, args, output: caught.append(output[0]))
    stock_hidden(model, rows)
    return caught


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("objective", ["block_diffusion", "mdlm", "fast_dllm_v2"])
def test_losses_and_their_gradients_are_those_of_the_formula(objective, checkpointing):
    _, rows = rows_of(objective)
    model = tiny("qwen3_moe")
    twin = stock(model)
    logits = logits_of(twin, rows)
    balance = torch.stack([load_balancing_loss_func((each,), EXPERTS, SLOTS) for each in logits]).mean()
    z = torch.stack([each.logsumexp(-1).square().mean() for each in logits]).mean()
    (0.3 * balance + 0.2 * z).backward()

    activations.apply(model, checkpointing)
    row_model = RowModel(model)
    row_model.routing = routing.watch(model, 0.3, 0.2)
    row_model.train()
    batch = row_model.collate(rows)
    with row_model.routing.watching(batch.counted, batch.labelled):
        hidden = row_model.hidden(batch)
    (0.0 * hidden.sum()).backward()
    found = row_model.routing.read(row_model.routing.mine(), 1)
    assert found["balance_loss"] == pytest.approx(float(balance), rel=1e-6)  # the router's softmax is fp32
    assert found["z_loss"] == pytest.approx(float(z), rel=1e-10)
    grads = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if "layers." in name:
            wanted = grads[name].grad
            wanted = torch.zeros_like(parameter) if wanted is None else wanted
            assert torch.allclose(parameter.grad, wanted, rtol=1e-5, atol=1e-7), name


def test_what_is_said_of_experts():
    """Of one layer: logits that send two rows of three to expert 0 and 1, the third, which stands for nothing, to 2."""
    model = tiny("qwen3_moe", num_hidden_layers=1)
    watched = routing.watch(model)
    gate = experts.routers_of(model)["model.layers.0.mlp.gate"]
    x = torch.linalg.pinv(gate.weight.detach()) @ torch.tensor(
        [[9.0, 9.0, 0.0], [8.0, 8.0, 0.0], [0.0, 0.0, 9.0], [0.0, 0.0, 8.0]], dtype=torch.float64
    )
    with watched.watching(torch.tensor([True, True, False]), torch.tensor([0])):
        gate(x.T)
    found = watched.read(watched.mine(), 1)
    p = torch.softmax(torch.tensor([9.0, 8.0, 0.0, 0.0]), 0)
    assert found == {
        "expert_load": 2.0, "experts_unused": 2, "router_entropy": pytest.approx(float(-(p * p.log()).sum()), rel=1e-6)
    }  # fmt: skip
    assert watched.read(watched.mine(), 0) == {}


def test_rows_that_stand_for_nothing_do_not_count():
    model = tiny("qwen3_moe")
    row_model = RowModel(model)
    assert not row_model.collate(inert(0.0)).counted.any()
    _, rows = rows_of("block_diffusion")
    assert np.all(row_model.collate(rows).counted.numpy())


def test_refused(monkeypatch):
    model = tiny("qwen3_moe")
    routing.check(model, {"model.balance_loss": 0.1})
    gate = type(model.model.layers[1].mlp.gate)
    original = gate.forward

    def weighed(router, x):
        logits, _, index = original(router, x)
        return logits, torch.sigmoid(logits)[:, :SLOTS], index

    monkeypatch.setattr(gate, "forward", weighed)
    with pytest.raises(UserError, match=r"balance_loss=0.1: model.layers.0.mlp.gate: .* does not weigh experts"):
        routing.check(tiny("qwen3_moe"), {"model.balance_loss": 0.1})
