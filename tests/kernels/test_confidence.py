"""The entropy of what is predicted right, against its formula and its gradient written out, in fp64."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.objectives.support import MASK
from tests.training.tiny import losses, train, weights
from unmask.errors import UserError
from unmask.kernels import Head, confidence
from unmask.objectives import LabelledRows, build

ROWS, WIDTH, WORDS = 9, 6, 64


def given(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight, bias = draw(ROWS, WIDTH), draw(WORDS, WIDTH), draw(WORDS)
    return hidden, weight, bias, draw(ROWS).abs()


def formula(hidden, weight, bias, softcap, label, loss_weight, exclude):
    """(value, d value / d hidden): sum w c H, and through dH / dz_j = -p_j (log p_j + H), row by row in numpy."""
    value, gradient = 0.0, np.zeros_like(hidden)
    for row in range(len(hidden)):
        raw = weight @ hidden[row] + bias
        z = raw if softcap is None else softcap * np.tanh(raw / softcap)
        slope = np.ones_like(z) if softcap is None else 1 - (z / softcap) ** 2
        kept = np.arange(len(z)) != (-1 if exclude is None else exclude)
        p = np.where(kept, np.exp(z - z[kept].max()), 0.0)
        p /= p.sum()
        log = np.log(np.where(kept, p, 1.0))
        entropy = -(p * log).sum()
        if np.where(kept, z, -np.inf).argmax() == label[row]:
            value += loss_weight[row] * entropy
            gradient[row] = loss_weight[row] * weight.T @ (slope * -p * (log + entropy))
    return value, gradient


@pytest.mark.parametrize("softcap, exclude", [(None, None), (5.0, None), (None, 7), (5.0, 7)])
def test_value_and_gradient_are_the_formula_s(softcap, exclude, monkeypatch):
    monkeypatch.setattr(confidence, "CHUNK", 4)
    hidden, weight, bias, loss_weight = given()
    logits = hidden @ weight.T + bias
    if exclude is not None:
        logits[:, exclude] = -torch.inf
    label = torch.where(torch.arange(ROWS) % 3 > 0, logits.argmax(-1), 0)  # two of three are right
    hidden.requires_grad_(True)
    shown = partial(Head(weight, bias, softcap).logits, exclude=exclude)
    total = confidence.entropy_of_correct(hidden, shown, label, loss_weight)
    total.backward()
    arrays = (each.detach().numpy() for each in (hidden, weight, bias))
    value, gradient = formula(*arrays, softcap, label.numpy(), loss_weight.numpy(), exclude)
    assert total.item() == pytest.approx(value, rel=1e-12) and value > 0
    np.testing.assert_allclose(hidden.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    assert torch.isfinite(hidden.grad).all()


def test_the_loss_of_llada2_gains_beta_times_it():
    hidden, weight, bias, loss_weight = given(1)
    label = (hidden @ weight.T + bias).argmax(-1)
    options = {"variant": "llada2", "confidence": 0.5}
    plain, more = (build("block_diffusion", each).model_copy(update={"mask_token_id": MASK})
                   for each in ({"variant": "llada2"}, options))  # fmt: skip
    head = Head(weight, bias, None)
    rows = LabelledRows(label, loss_weight, 9.0, {})
    terms, base = (each.loss(hidden, head, rows) for each in (more, plain))
    entropy, _ = formula(*(each.numpy() for each in (hidden, weight, bias)), None, label, loss_weight.numpy(), None)
    assert float(terms.sum) == pytest.approx(float(base.sum) + 0.5 * entropy, rel=1e-12)
    assert torch.equal(terms.nll, base.nll) and more.evaluation().confidence == 0


def test_it_trains_and_the_logged_loss_has_it(tmp_path):
    """As it is with the rows in two micro-batches."""
    options = {"name": "block_diffusion", "variant": "llada2", "block_size": 8, "confidence": 30.0}
    one = train(tmp_path / "one", "model.dtype=float64", "optimizer.learning_rate=0.05", "training.steps=4",
                "training.micro_batch=2", objective=options)  # fmt: skip
    two = train(tmp_path / "two", "model.dtype=float64", "optimizer.learning_rate=0.05", "training.steps=4",
                "training.micro_batch=1", objective=options)  # fmt: skip
    plain = {**options, "confidence": 0.0}
    train(
        tmp_path / "plain", "model.dtype=float64", "optimizer.learning_rate=0.05", "training.steps=4", objective=plain
    )
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), rtol=1e-9)
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(two)[name], rtol=1e-7, atol=1e-9)
    assert losses(tmp_path / "one") != losses(tmp_path / "plain")


def test_only_masked_tokens_have_it():
    with pytest.raises(UserError, match="confidence is of masked tokens"):
        build("block_diffusion", {"variant": "nemotron", "confidence": 0.5})
