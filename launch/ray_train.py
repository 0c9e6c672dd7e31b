"""A run under Ray Train: python launch/ray_train.py run.yaml --workers 4 --gpus parallel.data_parallel_size=4

Ray starts the processes and, after one is lost, starts them again (--restarts); the run goes on from its last
checkpoint. Needs the extra `ray`, and folders that all workers share.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict[str, Any]) -> None:
    """What every worker does; Ray has initialised torch.distributed, which `Trainer` takes as it is."""
    from unmask import Config, Trainer
    from unmask.cli.say import summary

    os.chdir(settings["folder"])
    ended = Trainer(config=Config.load(settings["config"], settings["overrides"])).train()
    if os.environ["RANK"] == "0":
        print(summary(ended.facts(), "launch/ray_train.py again"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with unmask under Ray Train.")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--workers", type=int, required=True, help="what the sizes of `parallel` multiply to")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--storage", type=Path, default=Path("ray"), help="folder for Ray's own records")
    given = parser.parse_intermixed_args()

    from unmask import Config
    from unmask.config import rules
    from unmask.errors import UserError

    try:
        config = Config.load(given.config, given.overrides)
        rules.check(rules.Known(config, processes=given.workers))
    except UserError as error:
        sys.exit(f"unmask: {error}")
    TorchTrainer(
        train,
        train_loop_config={"config": str(given.config), "overrides": given.overrides, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(
            storage_path=str(given.storage.resolve()), failure_config=FailureConfig(max_failures=given.restarts)
        ),
    ).fit()


if __name__ == "__main__":
    main()
