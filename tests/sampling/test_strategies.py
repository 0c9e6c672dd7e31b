"""Every commit strategy on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.sampling.reference import MASK, tiny
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling import Options, sample, strategies
from unmask.sampling.choice import Candidates
from unmask.sampling.options import OWN, STRATEGIES

BLOCK = Decoding("block", 8, False)


def candidates(*rows: list[float], order: list[float] | None = None) -> Candidates:
    """Greedy candidates of these distributions."""
    probability = torch.tensor(rows, dtype=torch.float64)
    confidence, token = probability.max(-1)
    return Candidates(token, confidence, probability, torch.tensor(order or [0.0] * len(rows)))


def surest(*confidence: float) -> Candidates:
    return candidates(*[[c, 1 - c] for c in confidence])


def commit(name: str, of: Candidates, quota: int = 1, **options) -> list[int]:
    return strategies[name](of, quota, Options(strategy=name, **options)).tolist()


def test_low_confidence_takes_the_most_confident():
    assert commit("low_confidence", surest(0.6, 0.9, 0.7, 0.8), 2) == [1, 3]
    assert commit("low_confidence", surest(0.9, 0.9, 0.9), 2) == [0, 1]  # the first among equals


def test_threshold_takes_all_above_it_and_at_least_the_quota():
    of = surest(0.6, 0.95, 0.7, 0.92)
    assert commit("threshold", of, threshold=0.9) == [1, 3]
    assert commit("threshold", of, threshold=0.95) == [1]  # 0.95 does not exceed it
    assert commit("threshold", of, 3, threshold=0.9) == [1, 3, 2]
    assert commit("threshold", of, threshold=1.0) == [1]
    assert sorted(commit("threshold", of, threshold=0.5)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "factor, taken",
    [
        # (n + 1)(1 - c_n) of 0.9, 0.85, 0.8, 0.6: 0.2, 0.45, 0.8, 2.0
        (0.1, [1]),
        (0.3, [1]),
        (0.5, [1, 3]),
        (0.79, [1, 3]),
        (0.81, [1, 3, 0]),
        (2.1, [1, 3, 0, 2]),
    ],
)
def test_dynamic_takes_fewer_the_less_sure_they_are(factor, taken):
    assert commit("dynamic", surest(0.8, 0.9, 0.6, 0.85), factor=factor) == taken


def test_dynamic_takes_at_least_the_quota():
    assert commit("dynamic", surest(0.8, 0.9, 0.6, 0.85), 3, factor=0.1) == [1, 3, 0]


def binary(c: float) -> float:
    return -c * math.log(c) - (1 - c) * math.log(1 - c)


def test_entropy_takes_the_set_whose_sum_without_its_largest_stays_below_gamma():
    of = surest(0.99, 0.9, 0.95, 0.7)
    low, middle, high = binary(0.99), binary(0.95), binary(0.9)  # 0.056, 0.199, 0.325
    # Sum minus max of the first 1, 2, 3, 4: 0, low, low + middle, low + middle + high.
    for gamma, taken in [
        (0.0, [0]),
        (low - 1e-6, [0]),
        (low + 1e-6, [0, 2]),
        (low + middle - 1e-6, [0, 2]),
        (low + middle + 1e-6, [0, 2, 1]),
        (low + middle + high + 1e-6, [0, 2, 1, 3]),
    ]:
        assert commit("entropy", of, gamma=gamma) == taken
    assert commit("entropy", of, 2, gamma=0.0) == [0, 2]


def test_entropy_counts_a_certain_token_as_none():
    assert commit("entropy", candidates([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]), gamma=0.0) == [0, 1, 2]


def test_margin_takes_the_largest_gap_not_the_largest_probability():
    of = candidates([0.5, 0.48, 0.02], [0.45, 0.2, 0.35], [0.4, 0.3, 0.3])  # gaps 0.02, 0.1, 0.1
    assert commit("margin", of, 1) == [1]
    assert commit("margin", of, 2) == [1, 2]
    assert commit("low_confidence", of, 1) == [0]


def test_random_follows_the_random_numbers():
    assert commit("random", candidates([0.9, 0.1], [0.6, 0.4], [0.7, 0.3], order=[0.2, 0.8, 0.5]), 2) == [1, 2]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_fills_a_block(name):
    model, _ = tiny()
    result = sample(model, None, [1, 2, 3], decoding=BLOCK, length=13, strategy=name)
    assert len(result.token) == 13 and MASK not in result.token


@pytest.mark.parametrize("name", ["low_confidence", "margin", "random"])
def test_steps_share_the_masks_as_llada_does(name):
    """10 masks in 4 steps: 3, 3, 2, 2."""
    model, _ = tiny()
    left = []
    options = {"decoding": Decoding("full", None, False), "length": 10, "steps": 4, "strategy": name}
    result = sample(model, None, [1, 2], report=lambda canvas: left.append(int(canvas.open.sum())), **options)
    assert left == [7, 4, 2, 0] and result.passes == 4


def test_a_random_order_follows_the_seed():
    model, _ = tiny()
    options = {"decoding": Decoding("full", None, False), "length": 12, "strategy": "random"}
    first, again, other = (sample(model, None, [1, 2], seed=seed, **options).token for seed in (1, 1, 3))
    assert first == again != other


def test_a_strategy_of_ones_own():
    def leftmost(of, quota, options):
        return torch.arange(quota)

    strategies.add("leftmost", leftmost)
    model, _ = tiny()
    order = []

    def report(canvas):
        order.append(canvas.first_open)

    options = {"strategy": "leftmost", "threshold": 0.3}  # of its options nothing is known
    sample(model, None, [1, 2], decoding=BLOCK, length=6, report=report, **options)
    assert order == [3, 4, 5, 6, 7, 8]
    strategies.add("never", lambda of, quota, options: torch.arange(0))
    with pytest.raises(UserError, match="strategy=never commits nothing"):
        sample(model, None, [1, 2], decoding=BLOCK, length=6, strategy="never")


def test_an_unknown_strategy_is_refused():
    model, _ = tiny()
    with pytest.raises(UserError, match="unknown strategy 'margn' .did you mean 'margin'"):
        sample(model, None, [1], decoding=BLOCK, strategy="margn")


@pytest.mark.parametrize("name, option", OWN.items())
def test_an_option_of_another_strategy_is_refused(name, option):
    model, _ = tiny()
    other = "margin" if name == "threshold" else "threshold"
    with pytest.raises(UserError, match=f"{option}=0.5 has no effect here: it needs strategy={name}"):
        sample(model, None, [1], decoding=BLOCK, strategy=other, **{option: 0.5})
    default = Options.model_fields[option].default
    with pytest.raises(UserError, match=f"{option}={default} has no effect here: it needs strategy={name}"):
        sample(model, None, [1], decoding=BLOCK, strategy=other, **{option: default})


@pytest.mark.parametrize("name", ["low_confidence", "low_entropy", "margin"])
def test_alg_temp_draws_without_replacement(name):
    """Frequencies of the first and second of three: p_i p_j / (1 - p_i), p = softmax(score / alg_temp)."""
    rows = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.55, 0.45]], dtype=torch.float64)
    score = {
        "low_confidence": rows[:, 0],
        "low_entropy": (rows * rows.log()).sum(-1),
        "margin": rows[:, 0] - rows[:, 1],
    }[name]
    p = (score / 0.3).softmax(0)
    order = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(3, 3, dtype=torch.float64)
    for uniform in order:
        first, second = commit(name, candidates(*rows.tolist(), order=uniform.tolist()), 2, alg_temp=0.3)
        counts[first, second] += 1
    for i in range(3):
        for j in range(3):
            expected = p[i] * p[j] / (1 - p[i]) if i != j else 0.0
            assert (
                abs(counts[i, j] / len(order) - expected) < 4 * (expected * (1 - expected) / len(order)) ** 0.5 + 1e-9
            )
