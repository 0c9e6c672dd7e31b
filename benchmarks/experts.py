"""Experts: the sorted product against transformers' own, and a step with divided experts against copies of the model.

kernel: forward and backward of one module of experts (32, four a row), in one process: how many times faster `unmask`
is than transformers' eager loop and than its default. step: a training step of two processes, copies of a mixture
against the same with its experts divided, both in the same processes and interleaved; a round's time is that of the
slower rank, a figure the median over rounds of the ratio.

    python benchmarks/experts.py [--json] [--rounds 15] [--only kernel step]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, Worker, interleave, ratio, run_cases
from ranks import Ranks

RANKS, PACK, VOCABULARY = 2, 1024, 2048
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 128, "num_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": VOCABULARY, "tie_word_embeddings": True,
}  # fmt: skip
SIDES: dict[str, dict[str, int]] = {
    "copies": {"data_parallel_size": RANKS},
    "experts": {"data_parallel_size": RANKS, "expert_parallel_size": RANKS},
    "sharded": {"shard_size": RANKS},
    "sharded experts": {"shard_size": RANKS, "expert_parallel_size": RANKS},
}


def loaded() -> Any:
    from unmask.config import ModelConfig
    from unmask.models import load

    return load(ModelConfig(config=MODEL, mask_token_id=VOCABULARY - 1)).model


def product(name: str) -> Callable[[], None]:
    """Forward and backward of a layer's experts as `name` computes them."""
    import torch

    torch.set_num_threads(2)
    model = loaded()
    model.set_experts_implementation(name)
    layer = model.base_model.layers[0].mlp
    hidden = torch.randn((2 * PACK, MODEL["hidden_size"]), requires_grad=True)
    with torch.no_grad():
        _, weights, index = layer.gate(hidden)

    def step() -> None:
        layer.experts(hidden, index, weights).square().sum().backward()

    return step


def kernel(rounds: int) -> list[Figure]:
    workers = [Worker(name, product, name) for name in ("eager", "grouped_mm", "unmask")]
    interleave(workers, 3 * rounds, 3)
    for worker in workers:
        worker.close()
    eager, grouped, ours = workers
    return [
        Figure("sorted experts, times faster than transformers' eager", ratio(eager, ours), 1.0, ">="),
        Figure("sorted experts, times faster than transformers' grouped_mm", ratio(grouped, ours), 0.95, ">="),
    ]


def steps(device: Any, held: ExitStack) -> dict[str, Callable[[], None]]:
    """A training step of every side, over the same rows."""
    import numpy as np
    import torch

    from unmask.config import ParallelConfig
    from unmask.models import RowModel
    from unmask.objectives import build
    from unmask.parallel import apply
    from unmask.parallel import replicas as data
    from unmask.parallel.mesh import started
    from unmask.rows import Document

    objective = build("block_diffusion", {"block_size": 32}).model_copy(update={"mask_token_id": VOCABULARY - 1})
    token = np.random.default_rng(int(os.environ["RANK"])).integers(0, VOCABULARY - 1, PACK)
    documents = [Document(token, np.ones(PACK, bool), 0)]
    rows = objective.rows(documents, 0, objective.levels(documents, 0)).pruned()
    found: dict[str, Callable[[], None]] = {}
    for name, sizes in SIDES.items():
        config = ParallelConfig(**sizes, timeout=60)
        mesh = held.enter_context(started(config, device))
        row_model = RowModel(loaded(), skip_last_layer="auto")
        module, _ = apply.parallelise(row_model, mesh, config, torch.float32)
        batch = row_model.collate(rows)

        def step(module: Any = module, row_model: Any = row_model, batch: Any = batch) -> None:
            with data.summing(module, True):
                (module(batch, objective).sum / (RANKS * rows.count)).backward()
            row_model.zero_grad()

        found[name] = step
    return found


def step(rounds: int) -> list[Figure]:
    """A step with divided experts over one without."""
    with Ranks(steps, RANKS) as ranks:
        steps_taken = ranks.rounds(list(SIDES), rounds)
    taken = {name: [max(rank.seconds for rank in step) for step in found] for name, found in steps_taken.items()}

    def over(ours: str, theirs: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[ours], taken[theirs], strict=True))

    return [
        Figure("divided experts, step time over copies, 2 ranks", over("experts", "copies"), 1.1, "<="),
        Figure(
            "divided experts, step time over the same FSDP2, 2 ranks", over("sharded experts", "sharded"), 1.1, "<="
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, {"kernel": kernel, "step": step}, 15, "rounds"))
