"""Prompts sampled together: each gives what it gives alone, in fewer passes."""

from __future__ import annotations

import pytest
import torch

from tests.models import families
from tests.sampling.reference import EOS, MASK, tiny
from tests.sampling.test_drivers import Stub
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling import Fill, Network, sample

RAGGED = [[1, 2, 3], list(range(17)), [5] * 8, [9]]
KINDS = [
    Decoding("block", 4, False),
    Decoding("block", 4, True),
    Decoding("block", 4, False, True),
    Decoding("full", None, False),
    Decoding("full", None, True),
    Decoding("causal", None, True),
]


def counted(monkeypatch) -> list[int]:
    """Rows of every forward pass."""
    rows: list[int] = []
    forward = Network._forward

    def spy(self, group):
        before = self.passes
        answers = forward(self, group)
        rows.extend([sum(len(segment) for _, _, its in group for segment in its)] * (self.passes - before))
        return answers

    monkeypatch.setattr(Network, "_forward", spy)
    return rows


@pytest.mark.parametrize("windows", [None, 5])
@pytest.mark.parametrize("decoding", KINDS, ids=str)
def test_a_ragged_batch_gives_what_each_gives_alone(decoding, windows, monkeypatch):
    model, _ = tiny(windows=windows)
    options = {"decoding": decoding, "length": 11, "temperature": 0.7, "seed": 5}
    alone = [sample(model, None, prompt, **options) for prompt in RAGGED]
    rows = counted(monkeypatch)
    together = sample(model, None, RAGGED, **options)
    assert [one.token for one in together] == [one.token for one in alone]
    assert [one.passes for one in together] == [one.passes for one in alone]
    assert [one.prompt for one in together] == [0, 1, 2, 3]
    assert len(rows) == max(one.passes for one in alone)


def test_samples_of_a_prompt_are_those_of_the_next_seeds():
    model, _ = tiny()
    options = {"decoding": Decoding("block", 4, False), "length": 9, "temperature": 1.0}
    found = sample(model, None, [[1, 2], [7]], num_samples=3, seed=4, **options)
    assert [(one.prompt, one.number) for one in found] == [(p, s) for p in (0, 1) for s in (0, 1, 2)]
    for one in found:
        assert one.token == sample(model, None, [[1, 2], [7]][one.prompt], seed=4 + one.number, **options).token
    assert len({tuple(one.token) for one in found}) > 1


def test_a_batch_is_cut_to_batch_size_and_to_rows(monkeypatch):
    model, _ = tiny()
    options = {"decoding": Decoding("full", None, False), "length": 4, "steps": 2}
    whole = sample(model, None, RAGGED, **options)
    rows = counted(monkeypatch)
    assert sample(model, None, RAGGED, batch_size=3, **options)[3].token == whole[3].token
    assert rows == [7 + 21 + 12] * 2 + [5] * 2
    rows.clear()
    monkeypatch.setattr("unmask.sampling.network.ROWS", 30)
    assert [one.token for one in sample(model, None, RAGGED, **options)] == [one.token for one in whole]
    assert rows == [28, 17] * 2


def test_who_has_ended_leaves_the_batch(monkeypatch):
    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight[EOS] += 40 * torch.sign(model.lm_head.weight[EOS])
    prompts = [[seed, 2, 3] for seed in range(12)]
    options = {"decoding": Decoding("block", 4, False), "length": 32}
    alone = [sample(model, Stub(), prompt, **options) for prompt in prompts]
    rows = counted(monkeypatch)
    together = sample(model, Stub(), prompts, **options)
    assert [one.token for one in together] == [one.token for one in alone]
    assert len({len(one.token) for one in alone}) > 1  # some ended early
    assert len(rows) == max(one.passes for one in alone) and rows[-1] < rows[0]


def test_holes_in_batches():
    model, _ = tiny(seed=3)
    options = {"decoding": Decoding("block", 8, False), "threshold": 0.2}
    texts = [Fill(([1, 2, 3], [4, 5], [6]), (3, 4)), Fill(([7] * 9, [8]), (2,))]
    together = sample(model, None, texts, **options)
    assert [[len(hole.token) for hole in one.holes] for one in together] == [[3, 4], [2]]
    for text, one in zip(texts, together, strict=True):
        assert one.token == sample(model, None, text, **options).token
    infilled = sample(model, None, [[1, 2], [3] * 6], suffix=[[4], [5, 6]], length=5, **options)
    for prompt, suffix, one in zip([[1, 2], [3] * 6], [[4], [5, 6]], infilled, strict=True):
        assert one.token == sample(model, None, prompt, suffix=suffix, length=5, **options).token


@pytest.mark.parametrize("windows", [None, 5])
@pytest.mark.parametrize("decoding", [kind for kind in KINDS if kind.kind != "full"], ids=str)
def test_the_cache_changes_nothing_but_the_work(decoding, windows, monkeypatch):
    model, _ = tiny(windows=windows)
    options = {"decoding": decoding, "length": 14, "temperature": 0.5}
    rows = counted(monkeypatch)
    cached = sample(model, None, RAGGED, **options)
    work = sum(rows)
    rows.clear()
    again = sample(model, None, RAGGED, cache=False, **options)
    assert [one.token for one in again] == [one.token for one in cached]
    assert sum(rows) > 2 * work


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_can_be_batched_and_cached(family, dtype):
    """Experts, windows and grouped heads; in half precision rounding decides, so there only that it runs."""
    aligned = {"moe_intermediate_size": 16} if "moe" in family else {}  # for torch's grouped matrix product
    model = families.tiny(family, dtype, **aligned)
    prompts = [[4, 5, 6], [7] * 10]
    options = {"decoding": Decoding("block", 4, False), "length": 11, "threshold": 0.1}
    together = sample(model, None, prompts, **options)
    assert all(len(one.token) == 11 and families.MASK not in one.token for one in together)
    if dtype == "float64":
        assert [one.token for one in together] == [sample(model, None, one, **options).token for one in prompts]
        assert [one.token for one in together] == [
            one.token for one in sample(model, None, prompts, cache=False, **options)
        ]


def test_ctrl_c_keeps_what_every_text_has():
    model, _ = tiny()

    def stop(canvas):
        if canvas.steps == 3:
            raise KeyboardInterrupt

    options = {"decoding": Decoding("causal", None, True), "length": 9, "batch_size": 2}
    found = sample(model, None, [[1], [2], [3]], report=stop, **options)
    assert [one.interrupted for one in found] == [True, True, True]
    assert [len(one.token) for one in found] == [3, 3, 0]
    assert not model.training


def test_mistakes_are_told_before_the_first_pass():
    model, _ = tiny()
    model.config.max_position_embeddings = 20
    block = {"decoding": Decoding("block", 4, False)}
    with pytest.raises(
        UserError,
        match="prompt 2: sample: a text of 21 tokens, 6 of them to fill, does not fit the model's 20 positions",
    ):
        sample(model, None, [[1], [2] * 15], length=6, **block)
    assert len(sample(model, None, [[2] * 14], length=6, **block)[0].token) == 6
    with pytest.raises(UserError, match="num_samples=2 gives a list: write the prompt in one"):
        sample(model, None, [1], length=2, num_samples=2, temperature=1.0, **block)
    with pytest.raises(UserError, match="num_samples=2 has no effect here: it needs something random"):
        sample(model, None, [[1]], length=2, num_samples=2, **block)
    with pytest.raises(UserError, match="2 suffixes for 1 prompts"):
        sample(model, None, [[1]], suffix=[[1], [2]], length=2, **block)
    with pytest.raises(UserError, match="cache=False has no effect here"):
        sample(model, None, [1], length=2, cache=False, decoding=Decoding("full", None, False))
    causal, full = Decoding("causal", None, True), Decoding("full", None, False)
    for given in (
        {"cache": True, "decoding": full},
        {"strategy": "threshold", "decoding": causal},
        {"top_p": 1.0, **block},
    ):
        with pytest.raises(UserError, match=f"{next(iter(given))}=.* has no effect here"):  # its default, but given
            sample(model, None, [1], length=2, **given)
    assert len(sample(model, None, [1], length=2, num_samples=1, block_size=None, **block).token) == 2
    with pytest.raises(UserError, match="prompt 2: sample: the prompt is empty"):
        sample(model, None, [[1], []], length=2, decoding=Decoding("block", 4, True))
    with pytest.raises(UserError, match="the end token 40 is outside the model's vocabulary of 40"):
        sample(model, None, [1], length=2, end_tokens=[40], **block)


def test_other_end_tokens():
    model, _ = tiny()
    options = {"decoding": Decoding("causal", None, True), "length": 12}
    whole = sample(model, None, [3, 1], **options).token
    end = whole[5]
    cut = sample(model, None, [3, 1], end_tokens=[end], **options).token
    assert cut == whole[: whole.index(end)]
    assert MASK not in whole
