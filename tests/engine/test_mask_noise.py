"""Noise on the mask embedding: what it touches, and that it is a function of (seed, step)."""

import torch
from torch import nn

from unmask.engine.mask_noise import MaskNoise


def test_only_the_mask_token_is_moved_and_the_weight_is_not():
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 512)
    weight = embedding.weight.detach().clone()
    noise = MaskNoise(embedding, mask_token_id=3, steps=4, seed=1)
    ids = torch.tensor([[0, 3, 1, 3]])
    noise.at(0)
    moved = (embedding(ids) - weight[ids]).detach()
    assert torch.equal(moved[0, [0, 2]], torch.zeros(2, 512))
    assert torch.equal(moved[0, 1], moved[0, 3])
    assert abs(float(moved[0, 1].std()) / float(weight.std()) - 1) < 0.15
    noise.at(2)
    faded = (embedding(ids) - weight[ids]).detach()[0, 1]
    assert abs(float(faded.std()) / float(weight.std()) - 0.5) < 0.1
    noise.at(0)
    assert torch.equal((embedding(ids) - weight[ids]).detach(), moved)
    assert torch.equal(embedding.weight, weight)


def test_it_ends_and_never_enters_evaluation():
    embedding = nn.Embedding(4, 8)
    noise = MaskNoise(embedding, mask_token_id=3, steps=2, seed=1)
    ids = torch.tensor([3])
    noise.at(2)
    assert torch.equal(embedding(ids), embedding.weight[3:4])
    noise.at(0)
    assert not torch.equal(embedding(ids), embedding.weight[3:4])
    assert torch.equal(embedding.eval()(ids), embedding.weight[3:4])
