"""What everyday features cost a training step: averaged weights, the noise scale, the loss by level, background saves.

The model is that of benchmarks/single.py (Qwen3 shape, 4 layers, width 256, vocabulary 8192, tied), fp32, AdamW, two
packs of 2048 tokens a step in two micro-batches. Each side is a whole `Trainer` in a process of its own that is halted
after every step; steps take turns, and a figure is the median over the rounds of (with - without) / without. The stall
of a checkpoint is what its step takes longer than the others of the same process.

    python benchmarks/everyday.py [--json] [--rounds 15] [--only ema noise levels saving]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, Worker, interleave, report
from single import MASK, SHAPE

LENGTH = 2048
OFF = {"log": {"noise_scale": False, "levels": 0, "console": "none"}}


class Halted:
    """A `Trainer` in a thread, stopped after every step: each call lets it make one more."""

    def __init__(self, changes: dict[str, Any]):
        import numpy as np

        from unmask import Config, Trainer

        self._folder = tempfile.TemporaryDirectory(prefix="unmask-")
        generator = np.random.default_rng(0)
        texts = [{"input_ids": generator.integers(0, MASK, LENGTH).tolist()} for _ in range(16)]
        tree: dict[str, Any] = {
            "model": {"config": SHAPE, "mask_token_id": MASK},
            "data": {"pack_tokens": LENGTH},
            "objective": {"name": "block_diffusion"},
            "training": {"steps": 100_000, "batch_size": 2},
            "checkpoint": {"path": str(Path(self._folder.name) / "run"), "keep": 1},
            **OFF,
        }
        for section, values in changes.items():
            tree[section] = {**tree.get(section, {}), **values}
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        trainer = Trainer(config=Config.parse(tree), callbacks=[self._halt])
        threading.Thread(target=trainer.train, args=(texts,), daemon=True).start()
        self._done.acquire()

    def _halt(self, trainer: Any, record: Any) -> None:
        self._done.release()
        self._go.acquire()

    def __call__(self) -> None:
        self._go.release()
        self._done.acquire()


def cost(name: str, changes: dict[str, Any], goal: float, rounds: int) -> list[Figure]:
    """The share of a step that `changes` add."""
    workers = [Worker("without", Halted, {}), Worker("with", Halted, changes)]
    interleave(workers, rounds, warmup=2)
    without, with_it = (worker.seconds for worker in workers)
    for worker in workers:
        worker.close()
    share = statistics.median((w - o) / o for w, o in zip(with_it, without, strict=True))
    return [Figure(f"{name}: share of a step", share, goal, "<=")]


def saving(rounds: int) -> list[Figure]:
    """Seconds that a step waits for a checkpoint, which it makes every fourth step."""
    figures, every = [], 4
    for name, asynchronous, goal in (("at once", False, 10.0), ("in the background", True, 0.5)):
        worker = Worker(name, Halted, {"checkpoint": {"every": every, "asynchronous": asynchronous}})
        # A save follows its step's callback: the call after step 4, 8, ... holds it. One step was made at the start.
        interleave([worker], every * max(4, rounds // 3), warmup=every)
        taken = [worker.seconds[first : first + every] for first in range(0, len(worker.seconds), every)]
        worker.close()
        place = max(range(every), key=lambda k: statistics.median(four[k] for four in taken))
        stall = statistics.median(four[place] - min(four) for four in taken)
        beside = statistics.median(sum(four) - every * min(four) for four in taken)
        figures.append(Figure(f"a checkpoint {name}: seconds its step takes longer", stall, goal, "<="))
        figures.append(Figure(f"a checkpoint {name}: seconds that {every} steps take longer", beside, goal * 2, "<="))
    return figures


CASES: dict[str, Callable[[int], list[Figure]]] = {
    "ema": lambda rounds: cost("averaged weights", {"training": {"ema": 0.999}}, 0.02, rounds),
    "noise": lambda rounds: cost("noise scale", {"log": {"noise_scale": True}}, 0.01, rounds),
    "levels": lambda rounds: cost("loss by level", {"log": {"levels": 5}}, 0.01, rounds),
    "saving": saving,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="counted steps of each side")
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="run these cases")
    arguments = parser.parse_args()
    figures = []
    start = time.perf_counter()
    for name in arguments.only or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures += CASES[name](arguments.rounds)
        print(f"{name} done after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
