"""Sampling to 1,024 tokens: the block sampler's KV cache against computing the prefix again at every step.

Qwen3 shape, 4 layers, width 256, 4/2 heads of 64, MLP 768, vocabulary 8192, random weights, fp32. Both sides sample the
same tokens from the same 32, in blocks of 32 and 8 steps a block; they take turns, and a ratio is the median over the
rounds. The last figure samples several texts together and one after the other.

    python benchmarks/sampling.py [--json] [--rounds 3] [--length 1024] [--texts 8]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report
from single import MASK, SHAPE

from unmask.config import ModelConfig
from unmask.models import load
from unmask.objectives import Decoding
from unmask.sampling import sample

BLOCK, PROMPT = 32, 32


def timed(side: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = side()
    return time.perf_counter() - start, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of samplings")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text, the prompt's among them")
    parser.add_argument("--texts", type=int, default=8, help="texts sampled together")
    arguments = parser.parse_args()
    return report(figures(arguments), arguments.json)


def figures(arguments: argparse.Namespace) -> Iterator[Figure]:
    model = load(ModelConfig(config=SHAPE, mask_token_id=MASK)).model
    prompts = torch.randint(0, 8000, (arguments.texts, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    options: dict[str, Any] = {"decoding": Decoding("block", BLOCK, False), "strategy": "low_confidence", "steps": 8}

    def one(length: int, **more: Any) -> list[int]:
        return sample(model, None, prompts[0], length=length - PROMPT, **options, **more).token

    one(4 * BLOCK), one(4 * BLOCK, cache=False)  # first calls are slow
    ratios, alike = [], []
    for _ in range(arguments.rounds):
        slow, expected = timed(lambda: one(arguments.length, cache=False))
        fast, token = timed(lambda: one(arguments.length))
        ratios.append(slow / fast)
        alike.append(sum(a == b for a, b in zip(token, expected, strict=True)) / len(token))
    yield Figure(f"{arguments.length} tokens: times faster with the cache", statistics.median(ratios), 3.0, ">=")
    yield Figure("share of tokens equal with and without it", min(alike), 1.0, ">=")

    short = {"length": arguments.length // 4 - PROMPT, **options}
    gains = []
    for _ in range(arguments.rounds):
        apart, _ = timed(lambda: [sample(model, None, prompt, **short) for prompt in prompts])
        together, _ = timed(lambda: sample(model, None, prompts, **short))
        gains.append(apart / together)
    yield Figure(f"{arguments.texts} texts: times faster together", statistics.median(gains), 1.3, ">=")


if __name__ == "__main__":
    sys.exit(main())
