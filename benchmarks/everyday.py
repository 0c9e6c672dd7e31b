"""What everyday features cost a training step: averaged weights, the noise scale, the loss by level, checkpoints.

The model is that of benchmarks/single.py (Qwen3 shape, 4 layers, width 256, vocabulary 8192, tied), fp32, AdamW, two
packs of 2048 tokens a step in two micro-batches. A whole `Trainer` runs with everything on; the time inside of the
functions that a feature adds is divided by the time of its step, and a figure is the median over the steps. The stall
of a checkpoint is the time until training goes on, the median over the saves.

    python benchmarks/everyday.py [--json] [--steps 12]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report
from single import MASK, SHAPE

LENGTH = 2048
#: Steps between checkpoints.
EVERY = 3


class Clock:
    """Seconds spent in functions, by feature, one entry a step."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        self._watched: list[tuple[Any, str, Any]] = []

    def watch(self, feature: str, owner: Any, *names: str) -> None:
        """Time the methods `names` of `owner`."""
        for name in names:
            self._watched.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(feature, getattr(owner, name)))

    def undo(self) -> None:
        for owner, name, original in self._watched:
            setattr(owner, name, original)

    def _timed(self, feature: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[feature] += time.perf_counter() - start

        return timed

    def turn(self, *_: Any) -> None:
        """A step is over."""
        self.steps.append(dict(self.now))
        self.now.clear()

    def share(self, feature: str) -> float:
        """Median of the feature's part of a step; the first step warms up."""
        return statistics.median(step.get(feature, 0.0) / step["step"] for step in self.steps[1:])

    def seconds(self, feature: str) -> float:
        return statistics.median(step[feature] for step in self.steps if feature in step)


def run(steps: int, asynchronous: bool) -> Clock:
    """Train with everything on."""
    import numpy as np

    from unmask import Config, Trainer
    from unmask.engine import engine as engines
    from unmask.engine.ema import Ema
    from unmask.engine.observe import LevelLosses, NoiseScale

    generator = np.random.default_rng(0)
    texts = [{"input_ids": generator.integers(0, MASK, LENGTH).tolist()} for _ in range(16)]
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="unmask-") as folder:
        config = Config.parse(
            {
                "model": {"config": SHAPE, "mask_token_id": MASK},
                "data": {"pack_tokens": LENGTH},
                "objective": {"name": "block_diffusion"},
                "training": {"steps": steps, "batch_size": 2, "ema": 0.999},
                "checkpoint": {"path": f"{folder}/run", "every": EVERY, "keep": 1, "asynchronous": asynchronous},
                "log": {"console": "none", "noise_scale": True, "levels": 5},
            }
        )
        clock.watch("step", Trainer, "_train_step")
        clock.watch("save", Trainer, "_save")
        clock.watch("ema", Ema, "update")
        clock.watch("levels", LevelLosses, "begin", "see", "sums", "take", "read")
        clock.watch("noise", engines, "square")
        clock.watch("noise", NoiseScale, "sums", "take", "update")
        Trainer(config=config, callbacks=[clock.turn]).train(texts)
    clock.undo()
    return clock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--steps", type=int, default=12, help="of each of the two runs")
    arguments = parser.parse_args()
    return report(figures(arguments.steps), arguments.json)


def figures(steps: int) -> Iterator[Figure]:
    print("checkpoints at once ...", file=sys.stderr, flush=True)
    plain = run(steps, False)
    yield Figure("averaged weights: share of a step", plain.share("ema"), 0.01, "<=")
    yield Figure("noise scale: share of a step", plain.share("noise"), 0.01, "<=")
    yield Figure("loss by level: share of a step", plain.share("levels"), 0.01, "<=")
    stall = plain.seconds("save")
    yield Figure("checkpoint at once: seconds of stall", stall, 2.0, "<=")
    print("checkpoints in the background ...", file=sys.stderr, flush=True)
    beside = run(steps, True).seconds("save")
    yield Figure("checkpoint in the background: seconds of stall", beside, 0.2, "<=")
    yield Figure("the second over the first", beside / stall, 0.2, "<=")


if __name__ == "__main__":
    sys.exit(main())
