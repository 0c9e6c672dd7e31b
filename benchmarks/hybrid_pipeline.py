"""The bubble of a pipeline of 2 ranks and 8 micro-batches against its theory, one thread a rank.

Theory is the same schedule's order with the durations that were measured in it, of every forward pass, backward pass
and, with zbv, backward pass of the input and of the weights: each starts as soon as its rank and its input are there,
and transfers take no time. Schedules take turns, step by step; figures are medians over rounds. The idle share is of
the time that a rank computes, of the rank that computes most.

    python benchmarks/hybrid_pipeline.py [--json] [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report
from ranks import Ranks

RANKS, MICRO = 2, 8
#: A small vocabulary: embedding and head are not to unbalance the stages.
MODEL = {
    "model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768, "vocab_size": 256,
}  # fmt: skip
PACK = 512
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
#: A measured step may take so much longer than its theory.
GOAL = 1.10


def steps(device: Any, held: ExitStack) -> dict[str, Callable[[], tuple[float, list[Any]]]]:
    """Of every schedule: what makes a step and returns its seconds and this rank's events."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from unmask.config import ModelConfig, ParallelConfig
    from unmask.models import RowModel, load
    from unmask.objectives import build
    from unmask.parallel import apply, stages
    from unmask.parallel.mesh import started
    from unmask.rows import Document

    objective = build("block_diffusion", {"block_size": 32}).model_copy(update={"mask_token_id": 255})
    token = np.random.default_rng(0).integers(0, 255, (MICRO, PACK))
    packs = [[Document(ids, np.ones(PACK, bool), number)] for number, ids in enumerate(token)]
    found = {}
    for name in SCHEDULES:
        config = ParallelConfig(pipeline_stages=RANKS, schedule=name, timeout=120)
        mesh = held.enter_context(started(config, device))
        row_model = RowModel(load(ModelConfig(config=MODEL, mask_token_id=255)).model)
        pipe = apply.Pipe(stages.even(config, MODEL["num_hidden_layers"]), nullcontext)
        module: Any = apply.parallelise(row_model, mesh, config, torch.float32, pipe)[0]
        batches = [row_model.collate(objective.rows(pack, 0, objective.levels(pack, 0)).pruned()) for pack in packs]

        def step(module: Any = module, batches: Any = batches, row_model: Any = row_model) -> tuple[float, list[Any]]:
            dist.barrier()
            start = time.perf_counter()
            module(batches, objective)
            seconds = time.perf_counter() - start
            row_model.zero_grad()
            return seconds, module.work.events

        found[name] = step
    return found


def bubbles(rounds: int) -> list[Figure]:
    """Step time over theory, and idle shares beside it, of every schedule."""
    from unmask.config import ParallelConfig
    from unmask.parallel.stages import bubble, simulated

    figures = []
    with Ranks(steps, RANKS) as ranks:
        taken = ranks.rounds(SCHEDULES, rounds)
    for name in SCHEDULES:
        parallel = ParallelConfig(pipeline_stages=RANKS, schedule=name)
        over, idle, theory = [], [], []
        for step in taken[name]:
            seconds, events = max(rank.found[0] for rank in step), [rank.found[1] for rank in step]
            ended, busy = simulated(events, RANKS * parallel.virtual)
            over.append(seconds / ended)
            idle.append(seconds / max(busy) - 1)
            theory.append(ended / max(busy) - 1)
        what = f"{name}, {RANKS} stages x {MICRO} micro-batches"
        share = statistics.median(theory)
        figures += [
            Figure(f"{what}: step time over theory", statistics.median(over), GOAL, "<="),
            Figure(f"{what}: idle share (in theory {share:.3f}, of equal stages {bubble(parallel, MICRO):.3f})",
                   statistics.median(idle), share + GOAL - 1, "<="),
        ]  # fmt: skip
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    return report(bubbles(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
