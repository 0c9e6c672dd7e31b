"""Attention alone: `attend` over tiles against SDPA under the dense mask, and what its plan costs.

Block diffusion rows (clean block-causal, every block noised once), block 32, 4/2 heads of 64, fp32; forward and
backward, both sides in one process, taking turns.

    python benchmarks/attention.py [--json] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report

from unmask.attention import Plan, attend
from unmask.attention.plan import Pattern
from unmask.objectives import build
from unmask.rows import Document, Rows, pairs

HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 64, 32


def rows_of(lengths: list[int]) -> Rows:
    """Block diffusion rows of documents of these lengths."""
    objective = build("block_diffusion", {"block_size": BLOCK}).model_copy(update={"mask_token_id": 0})
    return objective.rows([Document(np.ones(n, np.int64), np.ones(n, bool), i) for i, n in enumerate(lengths)], 0)


def heads(count: int, rows: int) -> torch.Tensor:
    return torch.randn(1, rows, count, WIDTH).transpose(1, 2).requires_grad_()


def against_dense(length: int, rounds: int) -> float:
    """How many times faster than SDPA with a boolean mask."""
    rows = rows_of([length])
    q, k, v = heads(HEADS, len(rows)), heads(KV_HEADS, len(rows)), heads(KV_HEADS, len(rows))
    mask = torch.from_numpy(rows.dense_mask())
    plan = Plan.from_rows(rows)
    dense = torch.nn.functional.scaled_dot_product_attention
    sides: list[Callable[[], torch.Tensor]] = [
        lambda: dense(q, k, v, attn_mask=mask, enable_gqa=True),
        lambda: attend(q, k, v, plan.handle(None), WIDTH**-0.5)[0],
    ]
    ratios = []
    for number in range(rounds + 1):
        seconds = []
        for side in sides:
            start = time.perf_counter()
            side().backward(torch.ones_like(q))
            seconds.append(time.perf_counter() - start)
        if number:  # the first round warms up, and makes the plan's batches
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def plan_seconds(rows: Rows) -> float:
    """The time from rows to batches of tiles: best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        Pattern(rows, None, None, "tiles", torch.device("cpu")).batches  # noqa: B018
        best = min(best, time.perf_counter() - start)
    return best


def waste(rows: Rows) -> float:
    """Cells computed beyond the attended pairs, in per cent of these."""
    batches = Pattern(rows, None, None, "tiles", torch.device("cpu")).batches
    cells = sum(batch.q.count * batch.q.size * batch.k.size for batch in batches)
    return 100 * (cells / int(pairs(rows).sum()) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    arguments = parser.parse_args()
    return report(figures(arguments.rounds), arguments.json)


def figures(rounds: int) -> Iterator[Figure]:
    long, packed = rows_of([65536]), rows_of([600] * 109)
    yield Figure("2L=4096: times faster than a dense mask", against_dense(2048, rounds), 2.2, ">=")
    yield Figure("2L=16384: times faster than a dense mask", against_dense(8192, rounds), 3.3, ">=")
    yield Figure("plan of 65,536 tokens in blocks of 32, seconds", plan_seconds(long), 0.1, "<=")
    yield Figure("wasted cells, one document of 65,536, per cent", waste(long), 6.0, "<=")
    yield Figure("wasted cells, packed documents of 600, per cent", waste(packed), 6.0, "<=")


if __name__ == "__main__":
    sys.exit(main())
