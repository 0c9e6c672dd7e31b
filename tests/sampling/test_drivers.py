"""Cached sampling against brute force: the same tokens, logits equal to 1e-10 in fp64, the expected passes."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.reference import EOS, MASK, block_mask, logits, tiny
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling import Network, Noisy, Options, sample, samplers


def recorded(monkeypatch) -> list[torch.Tensor]:
    """Every [positions, vocabulary] of logits that a denoising step produced."""
    seen: list[torch.Tensor] = []
    run = Network.run

    def spy(self, asked):
        answers = run(self, asked)
        seen.extend(without_mask(answers[number]) for number, one in asked.items() if isinstance(one, Noisy))
        return answers

    monkeypatch.setattr(Network, "run", spy)
    return seen


def choose(rows: torch.Tensor, threshold: float, at_least: int) -> dict[int, int]:
    """Greedy tokens of the positions to commit, by index into `rows`."""
    best = rows.softmax(-1).max(-1)
    order = sorted(range(len(rows)), key=lambda i: -float(best.values[i]))
    sure = [i for i in order if best.values[i] > threshold]
    return {i: int(best.indices[i]) for i in order[: max(at_least, len(sure))]}


def without_mask(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[:, MASK] = -torch.inf
    return rows


def brute_block(twin, token, wanted, decoding, threshold, window=None):
    """Fill `wanted` of `token` block by block; returns the tokens and the logits of every step."""
    size, shift = decoding.block_size, decoding.shift
    clean = 1 if decoding.causal else size
    token, left, steps = list(token), set(wanted), []
    for start in range(min(wanted) // size * size, len(token), size):
        stop = min(start + size, len(token))
        while open_ := sorted(p for p in left if start <= p < stop):
            first = shift and open_[0] == start
            # A shifted model's first token of a block is predicted by the block before, as a noisy block without masks.
            begin = start - size if first else start
            end = start if first else stop
            rows = token[:begin] + token[begin:end]
            positions = list(range(begin)) + list(range(begin, end))
            masks = {
                "full_attention": block_mask(begin, begin, end, clean),
                "sliding_attention": block_mask(begin, begin, end, clean, window),
            }
            out = without_mask(logits(twin, rows, positions, masks))
            if first:
                token[start] = int(out[-1].argmax())
                left.discard(start)
                continue
            predicted = out[[p - shift for p in open_]]
            steps.append(predicted)
            for i, value in choose(predicted, threshold, 1).items():
                token[open_[i]] = value
                left.discard(open_[i])
    return token, steps


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("threshold", [0.12, 0.3, 1.0])
@pytest.mark.parametrize("before", [4, 6, 11])
def test_block_equals_brute_force(shift, threshold, before, monkeypatch):
    model, twin = tiny()
    seen = recorded(monkeypatch)
    prompt = torch.randint(0, 38, (before,), generator=torch.Generator().manual_seed(before)).tolist()
    length = 16 - before
    decoding = Decoding("block", 4, shift)
    result = sample(model, None, prompt, decoding=decoding, length=length, threshold=threshold)
    token, steps = brute_block(twin, prompt + [MASK] * length, range(before, 16), decoding, threshold)
    assert result.token == token[before:]
    assert len(steps) == len(seen)
    for ours, theirs in zip(seen, steps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_sliding_window(monkeypatch):
    model, twin = tiny(windows=5)
    seen = recorded(monkeypatch)
    prompt = list(range(6))
    decoding = Decoding("block", 4, False)
    result = sample(model, None, prompt, decoding=decoding, length=14, threshold=0.2)
    token, steps = brute_block(twin, prompt + [MASK] * 14, range(6, 20), decoding, 0.2, window=5)
    assert result.token == token[6:]
    for ours, theirs in zip(seen, steps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_causal_clean_stream(monkeypatch):
    model, twin = tiny()
    seen = recorded(monkeypatch)
    decoding = Decoding("block", 4, False, causal=True)
    result = sample(model, None, list(range(6)), decoding=decoding, length=14, threshold=0.2)
    token, steps = brute_block(twin, [*range(6)] + [MASK] * 14, range(6, 20), decoding, 0.2)
    assert result.token == token[6:]
    for ours, theirs in zip(seen, steps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("size", [None, 5])
def test_full_equals_brute_force(shift, size):
    model, twin = tiny()
    prompt, length = list(range(7)), 12
    result = sample(
        model, None, prompt, decoding=Decoding("full", None, shift), length=length, block_size=size, threshold=0.2
    )
    token = prompt + [MASK] * length
    mask = {"full_attention": torch.ones(19, 19, dtype=torch.bool)}
    passes = 0
    for first in range(7, 19, size or length):
        while open_ := [p for p in range(first, min(19, first + (size or length))) if token[p] == MASK]:
            out = without_mask(logits(twin, token, list(range(19)), mask))[[p - shift for p in open_]]
            for i, value in choose(out, 0.2, 1).items():
                token[open_[i]] = value
            passes += 1
    assert result.token == token[7:]
    assert result.passes == passes


def test_causal_equals_brute_force():
    model, twin = tiny()
    result = sample(model, None, [3, 1, 4], decoding=Decoding("causal", None, True), length=9)
    token = [3, 1, 4]
    for _ in range(9):
        n = len(token)
        out = logits(twin, token, list(range(n)), {"full_attention": torch.ones(n, n, dtype=torch.bool).tril()})
        token.append(int(without_mask(out)[-1].argmax()))
    assert result.token == token[3:]
    assert result.passes == 9


def test_passes():
    model, _ = tiny()
    decoding = Decoding("block", 4, False)
    prompt = list(range(8))
    # 1 prefill, 12 tokens one at a time, 2 commits (the last block needs none).
    assert sample(model, None, prompt, decoding=decoding, length=12, threshold=1.0).passes == 1 + 12 + 2
    assert sample(model, None, prompt, decoding=decoding, length=12, threshold=1.0, steps=2).passes == 1 + 3 * 2 + 2
    assert sample(model, None, prompt, decoding=decoding, length=12, threshold=0.0).passes == 1 + 3 + 2
    # The shift's first token of a block is free.
    shifted = Decoding("block", 4, True)
    assert sample(model, None, prompt, decoding=shifted, length=12, threshold=1.0).passes == 1 + 9 + 2
    assert sample(model, None, [], decoding=decoding, length=4, threshold=1.0).passes == 4


@pytest.mark.parametrize("prompt", [5, 0])
@pytest.mark.parametrize(
    "decoding", [Decoding("block", 1000, False), Decoding("block", 1000, True), Decoding("full", None, False),
                 Decoding("full", None, True), Decoding("causal", None, True), Decoding("block", 1000, False, True)]
)  # fmt: skip
def test_a_block_is_cut_to_what_is_asked_for(decoding, prompt):
    """Nine tokens take nine passes at most, however large the block."""
    if prompt == 0 and decoding.shift:
        prompt = 1
    model, _ = tiny()
    options = {} if decoding.kind == "causal" else {"threshold": 1.0}
    result = sample(model, None, list(range(prompt)), decoding=decoding, length=9, **options)
    assert len(result.token) == 9 and len(result.canvas) == prompt + 9
    assert result.passes <= 9


class Stub:
    """As much of a tokeniser as sampling needs."""

    eos_token_id = EOS

    def get_vocab(self):
        return {str(place): place for place in range(40)}

    def decode(self, token):
        return " ".join(map(str, token))


def test_eos_ends_a_generation():
    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight[EOS] += 40 * torch.sign(model.lm_head.weight[EOS])
    every = [sample(model, Stub(), [seed, 2, 3], decoding=Decoding("block", 4, False), length=32) for seed in range(12)]
    ended = [result for result in every if len(result.token) < 32]
    assert ended
    for result in every:
        assert EOS not in result.token and MASK not in result.token
    for result in ended:
        assert int(result.canvas.token[result.canvas.end]) == EOS


def test_interrupt_keeps_what_is_committed():
    model, _ = tiny()

    def stop(canvas):
        if canvas.steps == 5:
            raise KeyboardInterrupt

    decoding = Decoding("causal", None, True)
    result = sample(model, None, [1, 2], decoding=decoding, length=9, report=stop)
    assert result.interrupted
    assert len(result.token) == 5
    assert result.token == sample(model, None, [1, 2], decoding=decoding, length=5).token


def test_seed_decides_the_draw():
    model, _ = tiny()
    options = {"decoding": Decoding("block", 4, False), "length": 16, "temperature": 1.0, "top_p": 0.9}
    first, again, other = (sample(model, None, [1, 2], seed=seed, **options).token for seed in (1, 1, 2))
    assert first == again != other


def test_random_draws_follow_the_model():
    """One masked token at temperature 2, top-p 0.8: frequencies against the truncated, tempered softmax."""
    from unmask.sampling.choice import draw
    from unmask.sampling.options import Options

    row = torch.tensor([2.0, -1.0, 0.5, 1.5, 0.0], dtype=torch.float64)
    options = Options(temperature=2.0, top_p=0.8)
    uniform = (torch.arange(20000) + 0.5) / 20000
    drawn = draw(row.repeat(20000, 1), options, torch.stack([uniform, uniform.flip(0)]))
    token = drawn.token
    tempered = (row / 2).softmax(-1)
    order = tempered.argsort(descending=True).tolist()
    kept: list[int] = []
    for index in order:
        if float(tempered[kept].sum()) < 0.8:
            kept.append(index)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = tempered[kept] / tempered[kept].sum()
    frequency = torch.bincount(token, minlength=5) / 20000
    torch.testing.assert_close(frequency.double(), expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(drawn.confidence, row.softmax(-1)[token])
    torch.testing.assert_close(drawn.probability[7], row.softmax(-1))
    assert torch.equal(drawn.order, uniform.flip(0))


def test_a_sampler_of_ones_own():
    def count_up(canvas, decoding, options):
        wanted = canvas.wanted(canvas.start, canvas.stop)
        canvas.fill(wanted, torch.arange(len(wanted)))
        yield from ()

    model, _ = tiny()
    samplers.add("count_up", count_up)
    seen = []
    options = {"length": 5, "method": "count_up", "report": lambda canvas: seen.append(canvas.answer())}
    result = sample(model, None, [7, 7], decoding=Decoding("block", 4, False), **options)
    assert result.token == [0, 1, 2, 3, 4] and seen == [result.token] and result.passes == 0
    assert "count_up" in samplers.names()


def test_options_from_a_command_line():
    assert Options.read(["temperature=0.8", "steps=4"]) == Options(temperature=0.8, steps=4)
    with pytest.raises(UserError, match="sample: unknown key 'lenght' .did you mean 'length'"):
        Options.read(["lenght=3"])
    with pytest.raises(UserError, match="unknown key 'eps' .did you mean 'steps'"):  # an optimiser's
        Options.read(["eps=0.1"])


def test_a_prompt_that_cannot_be_one_is_refused():
    model, _ = tiny()
    rows = model.get_input_embeddings().weight.shape[0]
    for prompt, fault in (([3, MASK], "the mask token"), ([rows], "outside"), ([-1], "outside")):
        with pytest.raises(UserError, match=fault):
            sample(model, None, prompt, decoding=Decoding("block", 4, False), length=3)
