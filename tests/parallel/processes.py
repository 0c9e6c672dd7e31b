"""Processes of `python -m unmask train` as a launcher starts them, and what they print."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from tests.parallel.workers import free_port

#: A bound for what hangs: processes that only take long are on a busy machine.
SECONDS = 300


def write_config(folder: Path, *overrides: str) -> Path:
    """A tiny run's YAML file and its data."""
    from tests.training.tiny import config, documents

    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in documents()), encoding="utf-8")
    settings = config(folder / "run", f"data.train={data}", "checkpoint.every=2", *overrides)
    settings.log.console = "plain"
    (folder / "run.yaml").write_text(settings.dump(), encoding="utf-8")
    return folder / "run.yaml"


def alone(folder: Path, *overrides: str) -> Path:
    """The run of `write_config` on one process, which is this one; returns its folder."""
    from unmask.config import Config
    from unmask.training.trainer import Trainer

    folder.mkdir(exist_ok=True)
    Trainer(config=Config.load(write_config(folder), list(overrides))).train()
    return folder / "run"


class Launched:
    """`size` processes of one run, started plainly."""

    def __init__(self, config: Path, size: int, *overrides: str):
        self.run = config.parent / "run"
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                       "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)}  # fmt: skip
        command = [sys.executable, "-m", "unmask", "train", str(config), *overrides]
        self.processes = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def until(self, step: int) -> None:
        """Wait until the run has logged `step`."""
        over = time.monotonic() + SECONDS
        while last_step(self.run) < step:
            assert time.monotonic() < over, "the run does not get on"
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            time.sleep(0.1)

    def ended(self, seconds: float = SECONDS) -> tuple[list[int], str, str]:
        """(exit codes, what all said on stdout, on stderr)."""
        return ended(self.processes, seconds)


def ended(processes: list[subprocess.Popen[str]], seconds: float = SECONDS) -> tuple[list[int], str, str]:
    """(exit codes, what all said on stdout, what on stderr but for the lines of steps)."""
    over = time.monotonic() + seconds
    said = [process.communicate(timeout=max(1.0, over - time.monotonic())) for process in processes]
    out, err = ("".join(part) for part in zip(*said, strict=True))
    err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("step "))
    return [process.returncode for process in processes], out, err


def last_step(run: Path) -> int:
    log = run / "log.jsonl"
    steps = re.findall(r'"kind": "step", "step": (\d+)', log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def command(config: str, overrides: list[str], of_rank: dict[int, list[str]], full_disk: bool = False) -> tuple:
    """`unmask train` inside a worker: (exit code, stderr). of_rank: overrides of single ranks."""
    import errno

    entry = import_module("unmask.cli.main")
    from unmask.runs.save import Checkpoints

    rank = int(os.environ["RANK"])
    failure = OSError(errno.ENOSPC, "No space left on device") if full_disk and rank == 0 else None
    said, code = io.StringIO(), 0
    arguments = ["unmask", "train", config, *overrides, *of_rank.get(rank, [])]
    entry.LINGER = 0
    with redirect_stderr(said), redirect_stdout(io.StringIO()), mock.patch.object(sys, "argv", arguments):
        with mock.patch.object(Checkpoints, "_write_tensors", side_effect=failure) if failure else mock.MagicMock():
            try:
                entry.main()
            except SystemExit as exit:
                code = int(exit.code or 0)
    return code, said.getvalue()
