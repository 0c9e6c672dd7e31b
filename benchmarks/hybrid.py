"""Composed parallelism: what dividing a model with FSDP2 costs over copies of it, a step of two processes; and what
checkpoints in the background cost.

Both sides live in the same processes and take turns, step by step, so that the machine's drift meets them alike; a
round's time is that of the slowest rank, a figure the median over rounds of the ratio. Processor time leaves out what a
rank waits, for another rank or for a core that other work holds.

    python benchmarks/hybrid.py [--json] [--rounds 15] [--only sharding saving]
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, run_cases
from ranks import Ranks

RANKS = 2
MODEL = {
    "model_type": "qwen3", "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768, "vocab_size": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
PACK = 2048
#: name -> sizes of the mesh.
SIDES: dict[str, dict[str, int]] = {
    "copies": {"data_parallel_size": RANKS},
    "zero 1": {"shard_size": RANKS, "zero": 1},
    "zero 2": {"shard_size": RANKS, "zero": 2},
    "zero 3": {"shard_size": RANKS, "zero": 3},
}


def steps(device: Any, held: ExitStack) -> dict[str, Callable[[], None]]:
    """A training step of every side, over the same rows."""
    import numpy as np
    import torch

    from unmask.config import ModelConfig, ParallelConfig
    from unmask.models import RowModel, load
    from unmask.objectives import build
    from unmask.parallel import apply
    from unmask.parallel import replicas as data
    from unmask.parallel.mesh import started
    from unmask.rows import Document

    objective = build("block_diffusion", {"block_size": 32}).model_copy(update={"mask_token_id": 4095})
    token = np.random.default_rng(int(os.environ["RANK"])).integers(0, 4095, PACK)
    documents = [Document(token, np.ones(PACK, bool), 0)]
    rows = objective.rows(documents, 0, objective.levels(documents, 0)).pruned()
    found: dict[str, Callable[[], None]] = {}
    for name, sizes in SIDES.items():
        config = ParallelConfig(**sizes, timeout=60)
        mesh = held.enter_context(started(config, device))
        row_model = RowModel(load(ModelConfig(config=MODEL, mask_token_id=4095)).model, skip_last_layer="auto")
        module, _ = apply.parallelise(row_model, mesh, config, torch.float32)
        optimizer = torch.optim.AdamW(row_model.parameters(), lr=1e-4, fused=True)
        batch = row_model.collate(rows)

        def step(module: Any = module, optimizer: Any = optimizer, batch: Any = batch) -> None:
            with data.summing(module, True):
                (module(batch, objective).sum / (RANKS * rows.count)).backward()
            optimizer.step()
            optimizer.zero_grad()

        found[name] = step
    return found


def sharding(rounds: int) -> list[Figure]:
    """Step time of every level of ZeRO over that of two copies."""
    with Ranks(steps, RANKS) as ranks:
        taken = ranks.rounds(list(SIDES), rounds)

    def over(name: str, which: str) -> float:
        pairs = zip(taken[name], taken["copies"], strict=True)
        slowest = ([max(getattr(rank, which) for rank in step) for step in pair] for pair in pairs)
        return statistics.median(ours / theirs for ours, theirs in slowest)

    return [Figure(f"FSDP2 {name}: {what} of a step over copies, {RANKS} ranks", over(name, which), 1.05, "<=")
            for name in SIDES if name != "copies"
            for which, what in (("seconds", "time"), ("processor", "processor time"))]  # fmt: skip


#: Sides of `saving`: sizes of the mesh by name.
SAVED: dict[str, dict[str, int]] = {
    "1 process": {}, "2 copies": {"data_parallel_size": 2}, "2 shards": {"shard_size": 2}
}  # fmt: skip
#: Steps between two checkpoints of `saving`.
INTERVAL = 40
#: Tokens of a pack in these runs: an interval takes some twenty seconds.
SHORT = 512


def train(rank: int, size: int, port: int, sizes: dict[str, int], rounds: int, pipe: Any) -> None:
    """One rank of a run with checkpoints in the background; answers with the seconds at which each step ended."""
    import numpy as np

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR",
    )  # fmt: skip
    from unmask import Config, Trainer

    tokens = np.random.default_rng(0).integers(0, 4095, (8, SHORT)).tolist()
    ended: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = folder if size == 1 else str(Path(tempfile.gettempdir()) / f"unmask-hybrid-{port}")
        tree = {
            "model": {"config": MODEL, "mask_token_id": 4095},
            "data": {"pack_tokens": SHORT},
            "objective": {"name": "block_diffusion", "block_size": 32},
            "parallel": sizes,
            "training": {"steps": (rounds + 1) * INTERVAL + 1, "batch_size": size, "threads": 1},
            "checkpoint": {"path": path, "every": INTERVAL, "asynchronous": True, "keep": 1},
            "log": {"console": "none"},
        }
        config = Config.parse(tree, "benchmark")
        trainer = Trainer(config=config, callbacks=[lambda *_: ended.append(time.perf_counter())])
        trainer.train([{"input_ids": each} for each in tokens])
        pipe.send(ended)
        if size > 1 and rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def saving(rounds: int) -> Iterator[Figure]:
    """What checkpoints in the background add to a run: of an interval's two halves, that with the save over the other.

    The half that begins with a save has the copy, and the writing beside its steps; half of the difference is the
    interval's.
    """
    for name, sizes in SAVED.items():
        ranks, port = max([1, *sizes.values()]), free_port()
        pipes, processes = [], []
        context = multiprocessing.get_context("spawn")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=train, args=(rank, ranks, port, sizes, rounds, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            ended = pipes[0].recv()
        except EOFError:
            sys.exit(f"a rank of {name} died")
        for process in processes:
            process.join()
        half, shares = INTERVAL // 2, []
        for save in range(INTERVAL - 1, rounds * INTERVAL, INTERVAL):  # the callback runs before the save
            with_save, without = (ended[save + (k + 1) * half] - ended[save + k * half] for k in (0, 1))
            shares.append((with_save - without) / (2 * without))
        what = f"saving in the background: part of the time of {INTERVAL} steps, {name}"
        yield Figure(what, statistics.median(shares), 0.05, "<=")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, {"sharding": sharding, "saving": saving}, 15, "rounds of each case"))
