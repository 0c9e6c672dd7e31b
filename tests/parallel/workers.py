"""Groups of worker processes that stay up for a whole test session: a case is a function call on every rank.

`Workers(4).run(function, *arguments)` calls function(*arguments) on each rank and returns the results by rank; the
function is importable and finds torch.distributed initialised. An exception of one rank is raised here. Workers are
forked from one server that has imported what runs need, which takes each process 4 s of its own otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

#: A bound for what hangs, not for what is slow: a worker that dies is noticed at once.
SECONDS = 900


class Workers:
    def __init__(self, size: int):
        self.size = size
        self._busy = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.preload"])
        port = free_port()
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.begin(function, *arguments)()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], list[Any]]:
        """As `run`, while the caller does something else: call what comes back for the results."""
        if self._busy:
            self._answers()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        self._busy = True
        return self._results

    def _results(self) -> list[Any]:
        answers = self._answers()
        failures = [f"rank {rank}:\n{failure}" for rank, (failure, _) in sorted(answers.items()) if failure is not None]
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(self.size)]

    def _answers(self) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        over = time.monotonic() + SECONDS
        while len(answers) < self.size:
            left = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self._pipes[rank] for rank in left], max(0.0, over - time.monotonic()))
            if not ready:
                self.close(0)
                raise AssertionError(f"ranks {left} did not answer within {SECONDS} s")
            for rank in left:
                if self._pipes[rank] in ready:
                    answers[rank] = self._answer(rank)
        self._busy = False
        return answers

    @property
    def up(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def _answer(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            self.close(0)
            raise AssertionError(f"rank {rank} of {self.size} ended with code {code}") from None

    def close(self, seconds: float = 10) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((None, function(*arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
