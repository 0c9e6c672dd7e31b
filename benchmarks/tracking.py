"""What the log and each tracker cost a training step: the time it waits for them, and the processor time they take.

The records are those of a real run (Qwen3, 4 layers, width 256, two packs of 1,024 tokens a step); they are sent at the
pace of its steps, so that what a tracker gathers before it writes is gathered here too. Processor time is that of the
process, threads and children (W&B's service) included, and compared with a step of all cores.

    python benchmarks/tracking.py [--json] [--records 30] [--only jsonl wandb ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report
from single import SHAPE

GOAL = 0.01
#: Seconds for a tracker to start (W&B's service, MLflow's tables), which happens once, beside the first steps.
START = 12.0
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")


def training(folder: Path, steps: int = 6) -> tuple[list[dict[str, Any]], float]:
    """The records of a short run, and the median seconds of a step of it."""
    import numpy as np

    from unmask import Config, Trainer

    tree = {
        "model": {"config": SHAPE, "mask_token_id": 8191},
        "data": {"pack_tokens": 1024},
        "objective": {"name": "block_diffusion", "block_size": 32},
        "training": {"steps": steps, "batch_size": 2},
        "checkpoint": {"path": str(folder)},
        "log": {"console": "none"},
    }
    generator = np.random.default_rng(0)
    texts = [{"input_ids": generator.integers(0, 8191, 1024).tolist()} for _ in range(8)]
    records: list[dict[str, Any]] = []
    Trainer(config=Config.parse(tree, "benchmark"), callbacks=[lambda _, record: records.append(record)]).train(texts)
    times = np.diff([record["time"] for record in records])
    return records, float(np.median(times))


def processor_seconds() -> float:
    """Of this process, its threads and its children, so far."""
    import psutil

    process = psutil.Process()
    everyone = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in everyone)


def cost(names: list[str], folder: Path, record: dict[str, Any], count: int, pause: float) -> tuple[float, float]:
    """(seconds waited, processor seconds) a record, of the log and the console and the trackers `names`."""
    from unmask.config import LogConfig
    from unmask.tracking import Start, build

    folder.mkdir(parents=True)
    log = LogConfig(trackers=names, console="none")
    made = build(log, lambda text: sys.exit(text))
    for tracker in made:
        tracker.start(Start(folder, 0, count, {"log": {"console": "none"}, "training": {"seed": 0}}))
    if names:
        time.sleep(START)
    waited = 0.0
    before = processor_seconds()
    for step in range(1, count + 1):
        start = time.perf_counter()
        for tracker in made:
            tracker.log({**record, "step": step})
        waited += time.perf_counter() - start
        time.sleep(pause)
    taken = processor_seconds() - before
    for tracker in made:
        tracker.close()
    return waited / count, taken / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--records", type=int, default=30, help="records sent to each tracker")
    parser.add_argument("--only", nargs="*", choices=["jsonl", *TRACKERS], help="measure these")
    arguments = parser.parse_args()
    return report(figures(arguments), arguments.json)


def figures(arguments: argparse.Namespace) -> Iterator[Figure]:
    with TemporaryDirectory() as folder:
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")
        records, step = training(Path(folder) / "run")
        print(f"a step takes {step:.3f} s", file=sys.stderr)
        for name in arguments.only or ("jsonl", *TRACKERS):
            names = [] if name == "jsonl" else [name]
            waited, taken = cost(names, Path(folder) / name, records[-1], arguments.records, step)
            title = "log and console" if name == "jsonl" else f"log, console and {name}"
            yield Figure(f"{title}: waits, share of a step", waited / step, GOAL, "<=")
            share = taken / (step * (os.cpu_count() or 1))
            yield Figure(f"{title}: processor time, share of a step", share, GOAL, "<=")


if __name__ == "__main__":
    sys.exit(main())
