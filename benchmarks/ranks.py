"""Ranks of one gloo group, a process and a thread each, that take turns at the sides of a comparison, step by step.

The machine's drift meets all sides alike; each step begins at a barrier.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

#: Steps of every side that are not counted.
WARMUP = 2


class Taken(NamedTuple):
    """A rank's step: seconds, seconds of its processor, and what the step returned."""

    seconds: float
    processor: float
    found: Any


class Ranks:
    """`with Ranks(make, size) as ranks`: make(device, held) gives every rank its steps by name."""

    def __init__(self, make: Callable[[Any, ExitStack], dict[str, Callable[[], Any]]], size: int):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(Path(self._folder.name) / "store"), theirs, make)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies is noticed
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def step(self, name: str) -> list[Taken]:
        """One step of side `name`, by rank."""
        for pipe in self._pipes:
            pipe.send(name)
        return self._answers()

    def rounds(self, names: Sequence[str], count: int) -> dict[str, list[list[Taken]]]:
        """Of every side, what `count` rounds took by rank; in a round each side makes a step."""
        taken: dict[str, list[list[Taken]]] = {name: [] for name in names}
        for number in range(count + WARMUP):
            for name in names:
                step = self.step(name)
                if number >= WARMUP:
                    taken[name].append(step)
        return taken

    def _answers(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            sys.exit("a benchmark rank died")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None:
                pipe.send(None)
                process.join()
            else:
                process.terminate()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Any, make: Callable[..., dict[str, Callable[[], Any]]]) -> None:
    """One rank: makes a step of the side that the parent names and answers with what it took."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this process
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with ExitStack() as held:
        steps = make(torch.device("cpu"), held)
        pipe.send("ready")
        while (name := pipe.recv()) is not None:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            found = steps[name]()
            pipe.send(Taken(time.perf_counter() - start, time.process_time() - used, found))
