"""Losses over a divided vocabulary against the whole one, in fp64: sum, nll, log-probabilities and every gradient."""

from __future__ import annotations

from itertools import product

import pytest

ROWS, WIDTH = 23, 12


def sharded_and_whole(vocabulary: int, bias: bool, softcap: float | None, exclude: int | None, dtype: str) -> dict:
    """name -> (of this rank, of the whole vocabulary's reference), in chunks of seven rows: of the weighted sum, and
    its gradients through single log-probabilities and through logits."""
    import sys

    import torch
    import torch.distributed as dist

    from tests.kernels import plain
    from unmask.kernels import Head, VocabularyShard

    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=generator).double() for shape in ((ROWS, WIDTH), (vocabulary, WIDTH))]
    hidden, weight, b = (x.requires_grad_() for x in (*wide, torch.randn(vocabulary, generator=generator).double()))
    label = torch.randint(1, vocabulary - 1, (ROWS,), generator=generator)
    loss_weight = torch.rand(ROWS, generator=generator).double() * 3
    whole, whole_nll = plain.linear_cross_entropy(
        hidden, weight, label, loss_weight, bias=b if bias else None, softcap=softcap, exclude=exclude
    )
    leaves = [hidden, weight, *([b] if bias else [])]
    expected = torch.autograd.grad(whole * 1.7, leaves)

    step = -(-vocabulary // dist.get_world_size())
    part = slice(dist.get_rank() * step, (dist.get_rank() + 1) * step)
    cast = getattr(torch, dtype)
    own = [x.detach().to(cast).requires_grad_() for x in (hidden, weight[part], b[part])]
    shard = VocabularyShard(part.start, vocabulary, dist.group.WORLD)
    head = Head(own[1], own[2] if bias else None, softcap, shard)
    own = own if bias else own[:2]
    module = sys.modules["unmask.kernels.linear_cross_entropy"]
    before, module.CHUNK = module.CHUNK, 7
    try:
        total, nll = head.cross_entropy(own[0], label, loss_weight, exclude)
        log_probs = head.log_probs(own[0], label, exclude)
        logits = head.logits(own[0], exclude)
        losses = torch.nn.functional.cross_entropy(logits, label, reduction="none")
        upstream = (1.7 * loss_weight).to(cast)
        found = [
            torch.autograd.grad(total * 1.7, own),
            torch.autograd.grad(log_probs, own, -upstream),
            torch.autograd.grad(losses, own, upstream),
        ]
    finally:
        module.CHUNK = before
    assert not nll.requires_grad and all(each.dtype == cast for way in found for each in way)
    wanted = [expected[0], *(each[part] for each in expected[1:])]
    pairs = {"sum": (total, whole), "nll": (nll, whole_nll), "log p": (-log_probs, whole_nll), "z": (losses, whole_nll)}
    for way, gradients in enumerate(found):
        names = ("hidden", "weight", "bias")
        pairs |= {f"{name} {way}": pair for name, *pair in zip(names, gradients, wanted)}  # noqa: B905
    return {name: (ours.detach().double().numpy(), theirs.detach().numpy()) for name, (ours, theirs) in pairs.items()}


CASES = [
    *(
        (37, bias, softcap, exclude, "float64")
        for bias, softcap, exclude in product((0, 1), (None, 5.0), (None, 0, 36))
    ),
    (4, True, 5.0, 0, "float64"),  # with four ranks one holds nothing but the excluded token
    (37, True, None, 0, "float32"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_vocabulary_is_the_whole_one(ranks, workers):
    for case in CASES:
        found = workers(ranks).run(sharded_and_whole, *case)
        tolerance = 1e-12 if case[-1] == "float64" else 1e-5
        for one in found:
            for name, (ours, whole) in one.items():
                assert abs(ours - whole).max() <= tolerance * max(1.0, abs(whole).max()), (case, name)
        assert all(
            (one[key][0] == found[0][key][0]).all() for one in found for key in ("hidden 0", "hidden 1", "hidden 2")
        )
