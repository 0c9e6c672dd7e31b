"""Every exchange under every placement gives the attention of one rank, and sends exactly the bytes it promises."""

from itertools import product

import pytest
import torch

from tests.parallel.attention_cases import OBJECTIVES, Case, run

PLACEMENTS, EXCHANGES = ("context", "csbp"), ("gather", "ring", "needed", "ulysses")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def check(workers, ranks, case):
    results = workers(ranks).run(run, case)
    for rank, result in enumerate(results):
        assert result["error"] < TOLERANCE[case.dtype], (rank, result)
        assert result["sent"] == result["predicted"], (rank, result)
    return results


@pytest.mark.parametrize("placement, exchange", list(product(PLACEMENTS, EXCHANGES)))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives(workers, objective, placement, exchange):
    for ranks, lengths, dtype in product((2, 4), ("one", "packed", "prompt"), TOLERANCE):
        check(workers, ranks, Case(objective, lengths, placement, exchange, dtype=dtype))


@pytest.mark.parametrize("placement, exchange", list(product(PLACEMENTS, ("gather", "ring", "needed"))))
def test_three_ranks_windows_and_packs_smaller_than_the_ranks(workers, placement, exchange):
    for objective, lengths, window in product(("bd3lm", "ar"), ("one", "packed", "tiny"), (None, 12)):
        check(workers, 3, Case(objective, lengths, placement, exchange, window, heads=(3, 1)))


@pytest.mark.parametrize("exchange", ["gather", "ring", "needed"])
def test_labelled_queries(workers, exchange):
    for ranks, placement, lengths in product((2, 3, 4), PLACEMENTS, ("one", "packed", "prompt", "tiny")):
        check(workers, ranks, Case("bd3lm", lengths, placement, exchange, labelled=True))


def test_queries_that_travel(workers):
    for ranks, lengths, window, dtype in product((2, 3, 4), ("one", "packed", "prompt", "tiny"), (None, 12), TOLERANCE):
        case = Case("bd3lm", lengths, "csbp", "query", window, labelled=True, dtype=dtype)
        results = check(workers, ranks, case)
        assert {result["exchange"] for result in results} == {"query"}


@pytest.mark.parametrize("exchange", ["ulysses+ring", "ulysses+gather", "ulysses+needed"])
def test_two_levels(workers, exchange):
    for objective, lengths, placement, heads in product(
        ("bd3lm", "mdlm"), ("one", "packed", "tiny"), PLACEMENTS, ((4, 2), (4, 1))
    ):
        check(workers, 4, Case(objective, lengths, placement, exchange, heads=heads, node_size=2))


def test_fewer_key_heads_than_ranks(workers):
    for lengths, heads in product(("one", "packed"), ((4, 1), (8, 2), (4, 4))):
        check(workers, 4, Case("bd3lm", lengths, "csbp", "ulysses", heads=heads))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_summed_over_ranks_the_bytes_are_the_formulas(workers, ranks):
    """S shared rows, s = g = 8 bytes: 2 S D_kv s (P-1) and 2 S D_kv (s + g) (P-1); M queries likewise."""
    for placement, exchange in product(PLACEMENTS, ("gather", "ring")):
        results = check(workers, ranks, Case("bd3lm", "one", placement, exchange))
        shared = sum(result["shared"] for result in results)
        keys = 2 * shared * (2 * 8) * 8 * (ranks - 1)
        assert [sum(result["sent"][i] for result in results) for i in (0, 1)] == [keys, 2 * keys]
    results = check(workers, ranks, Case("bd3lm", "one", "csbp", "query", labelled=True))
    queries = sum(result["queries"] for result in results)
    expected = [queries * (2 * 32 + 4) * 8 * (ranks - 1), queries * (3 * 32 + 2 * 4) * 8 * (ranks - 1)]
    assert [sum(result["sent"][i] for result in results) for i in (0, 1)] == expected
