"""Objectives with an autoregressive loss on the clean stream, and annealed attention, against hand-made sequences."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.objectives.support import MASK, bound, document, logits, row_loss, row_nll, tiny_model
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.rows import IGNORE

SIZE = 4


@pytest.fixture(scope="module")
def model():
    """transformers' norms compute in fp32 whatever they are given; these do not."""
    made = tiny_model(13)
    for norm in made.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.forward = partial(rms_norm, norm)
    return made


def rms_norm(norm, hidden):
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def autoregressive(model, chunk):
    """The mean of -log p(x[i+1] | x[..i]) over supervised targets, by the stock causal model."""
    scores = model(input_ids=torch.as_tensor(chunk.token)[None], use_cache=False).logits[0, :-1]
    label = np.where(chunk.supervised, chunk.token, IGNORE)[1:]
    return cross_entropy(scores, torch.as_tensor(label))


def after_causal(model, chunk, start, noisy):
    """Logits of one noisy block at `start`, after its clean, causal prefix, in a sequence of its own."""
    stop = start + len(noisy)
    mask = np.tril(np.ones((stop, stop), bool))
    mask[start:] = True
    return logits(model, [*chunk.token[:start], *noisy], np.arange(stop), mask)[start:]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def alike(model, ours, wanted):
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-10)
    for left, right in zip(gradients(model, ours), gradients(model, wanted), strict=True):
        assert (left - right).abs().max() <= 1e-10 * right.abs().max()


@pytest.mark.parametrize("clean_loss", [0.2, 0.0])
def test_i_dlm_is_two_losses_in_one_pass(model, clean_loss):
    chunk = document(10, 3, prompt=2, vocabulary=13)
    noisy = []
    for start in range(0, 10, SIZE):
        index = range(start, min(start + SIZE, 10))
        scores = after_causal(
            model, chunk, start, [MASK if chunk.supervised[i] else int(chunk.token[i]) for i in index]
        )
        noisy += [cross_entropy(scores[i - start], torch.tensor(int(chunk.token[i + 1])))
                  for i in index if i + 1 < 10 and chunk.supervised[i + 1]]  # fmt: skip
    assert len(noisy) == 8
    rows = bound("i_dlm", block_size=SIZE, clean_loss=clean_loss).rows([chunk], 0).pruned()
    ours = row_loss(model, rows) / rows.count
    alike(model, ours, torch.stack(noisy).mean() + clean_loss * autoregressive(model, chunk))


@pytest.mark.parametrize("draws", [1, 2])
def test_nemotron_is_two_losses_in_one_pass(model, draws):
    chunk = document(11, 5, prompt=1, vocabulary=13)
    joint = bound("block_diffusion", variant="nemotron", block_size=SIZE, draws=draws)
    apart = joint.model_copy(update={"noisy_loss": 1.0, "clean_loss": 0.0, "clean": "causal"})
    both, noisy = joint.rows([chunk], 7).pruned(), apart.rows([chunk], 7).pruned()
    assert (noisy.block[noisy.labelled] >= 0).all() and both.count == noisy.count == draws * 10
    alike(
        model,
        row_loss(model, both) / both.count,
        0.3 * row_loss(model, noisy) / noisy.count + autoregressive(model, chunk),
    )


def test_the_bound_of_i_dlm_is_that_of_its_decoder(model):
    """With every rest masked (the highest level), a block costs its first token exactly and its rest at once."""
    chunk = document(8, 2, vocabulary=13)
    objective = bound("i_dlm", block_size=SIZE).evaluation()
    assert objective.decoding == bound("i_dlm", block_size=SIZE).decoding == Decoding("block", SIZE, True, causal=True)
    with torch.no_grad():
        total = -after_causal(model, chunk, 0, chunk.token[:4])[0].new_zeros(())
        first = model(input_ids=torch.as_tensor(chunk.token)[None], use_cache=False).logits[0, 3]
        total += cross_entropy(first, torch.tensor(int(chunk.token[4])))
        for start in (0, 4):
            scores = after_causal(model, chunk, start, [int(chunk.token[start]), MASK, MASK, MASK])
            total += cross_entropy(scores[:3], torch.as_tensor(chunk.token[start + 1 : start + 4]), reduction="sum")
        levels = [np.full_like(one, 0.999) for one in objective.levels([chunk], 0)]
        rows = objective.rows([chunk], 0, levels)
        assert float(row_loss(model, rows)) / rows.count == pytest.approx(float(total) / 7, rel=1e-10)


def test_blocks_of_one_token_are_bounded_by_the_autoregressive_likelihood(model):
    chunk = document(9, 4, vocabulary=13)
    with torch.no_grad():
        rows = bound("i_dlm", block_size=1).evaluation().rows([chunk], 0)
        assert float(row_loss(model, rows)) / rows.count == pytest.approx(float(autoregressive(model, chunk)))


ANNEALED = [("mdlm", {"variant": "diffullama"}, 12), ("block_diffusion", {"block_size": SIZE}, SIZE),
            ("fast_dllm_v2", {"block_size": SIZE}, SIZE), ("i_dlm", {"block_size": SIZE}, SIZE)]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "size"), ANNEALED, ids=[name for name, _, _ in ANNEALED])
def test_annealed_blocks_open_from_the_diagonal(name, options, size, model):
    chunk = document(12, 6, vocabulary=13)
    objective = bound(name, anneal=0.5, **options)
    plain = bound(name, **options).rows([chunk], 0)
    for step, ahead in ((0, 0.0), (2, 0.2), (5, 0.5), (10, 1.0), (19, 1.0)):
        present = objective.at(step, 20)
        assert objective.moving(step, 20)["ahead"] == pytest.approx(ahead)
        rows = present.rows([chunk], 0)
        rows.check()
        noisy = rows.block >= 0
        place = rows.position[noisy] % size
        assert (rows.reach[noisy] == place + 1 + np.floor(ahead * (size - 1 - place) + 1e-9)).all()
        assert np.array_equal(rows.label, plain.label)
        assert (
            present.evaluation().rows([chunk], 0).reach == bound(name, **options).evaluation().rows([chunk], 0).reach
        ).all()
    assert (objective.at(12, 20).rows([chunk], 0).reach == plain.reach).all()
    with torch.no_grad():
        begun = row_nll(model, objective.at(0, 20).rows([chunk], 0))
        assert not torch.allclose(begun, row_nll(model, plain))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clean_loss": 0.2}, "needs clean: causal, keep_first: true and denominator: scored"),
        ({"variant": "nemotron", "block_size": "full"}, "clean_loss needs clean rows"),
        ({"variant": "nemotron", "denominator": "masked"}, "needs clean: causal"),
    ],
)
def test_a_clean_loss_that_is_no_mean_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        bound("block_diffusion", **options)
