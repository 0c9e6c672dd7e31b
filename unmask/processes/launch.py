"""`unmask train --nproc N`: torchelastic's agent starts the processes of one machine, watches them and, with
`--restarts K`, starts all of them again from the last checkpoint when one is lost.

What torchrun does by its own rules is done here by those of one process: signals are handed on, and the run ends with
the exit code that it would have alone; of a mistake one sentence is printed, and no restart is spent on it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import FrameType

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from unmask.config import ParallelConfig, rules
from unmask.errors import RankLost, UserError
from unmask.processes.launched import ROLE, by_launcher, run_id
from unmask.processes.meeting import LOOPBACK, OneMachine
from unmask.terminal import say

#: What a user or a scheduler ends a run with.
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Exit codes of a process that was told to end: by itself, or before it could hear of it.
TOLD_TO_END = {sign * number + base: 128 + number
               for number in (signal.SIGTERM, signal.SIGINT) for sign, base in ((1, 128), (-1, 0))}  # fmt: skip
#: Seconds that the others have to end after the first process that was told to.
GRACE = 5.0
#: Seconds until processes are killed that do not end when they are told to.
PATIENCE = 3.0


def size_of(asked: str, config: ParallelConfig) -> int:
    """The number of processes for `--nproc`; auto: one a GPU, else what the axes multiply to. UserError if unfit."""
    if by_launcher():
        raise UserError("--nproc starts processes, and this is one that a launcher has started: leave --nproc out")
    if asked == "auto":
        size = torch.cuda.device_count() or config.processes
    elif not asked.isdecimal() or int(asked) == 0:
        raise UserError(f"--nproc {asked}: give a number of processes, or auto")
    else:
        size = int(asked)
    rules.check(rules.Known(parallel=config, processes=size))
    return size


def launch(arguments: Sequence[str], size: int, restarts: int = 0) -> int:
    """Run `python -m unmask ARGUMENTS` as `size` processes; returns the exit code of the run.

    UserError for what the processes refused, and for a process that was lost for the last time.
    """
    with _environment(size), TemporaryDirectory(prefix="unmask-") as folder:
        spec = WorkerSpec(
            role=ROLE, local_world_size=size, entrypoint=sys.executable, args=("-m", "unmask", *arguments),
            rdzv_handler=OneMachine(run_id()), max_restarts=restarts, monitor_interval=0.1, local_addr=LOOPBACK,
        )  # fmt: skip
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder))
        with agent.handing_on():
            result = agent.run()
    return agent.verdict() if result.is_failed() else 0


class Agent(LocalElasticAgent):
    """torchelastic's agent, which asks why a process ended before it starts the group again."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs):
        super().__init__(spec, logs)
        self._command = spec.args
        self._received: int | None = None
        # The process that was first to fail, and the signals that the others are still to get, the next one when.
        self._first: int | None = None
        self._next: list[signal.Signals] = []
        self._deadline = 0.0
        self._cause: tuple[int, ProcessFailure] | None = None

    @contextmanager
    def handing_on(self) -> Iterator[None]:
        """Signals go to the processes, which know how to end; the agent waits for them."""
        before = {number: signal.signal(number, self._receive) for number in HANDED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._send(number)

    def _send(self, number: int) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            if _exit_code(pid) is None:
                os.killpg(pid, number)  # each leads a process group of its own

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._first = None
        found = super()._start_workers(worker_group)
        if self._received is not None:  # before there was anyone to hand it to
            self._send(self._received)
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._waiting():
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._judge(result)
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: float = PATIENCE) -> None:
        super()._shutdown(death_sig or signal.SIGTERM, int(PATIENCE))

    def _waiting(self) -> bool:
        """Whether others still run after a process that has not ended well. They are told to end, then killed: one that
        is stopped, or waits for a lost one, does not hear it. torchelastic would give them half a minute."""
        assert self._pcontext is not None
        codes = {rank: _exit_code(pid) for rank, pid in self._pcontext.pids().items()}
        failed = [rank for rank, code in codes.items() if code]
        if not failed or None not in codes.values():
            return False
        if self._first is None:
            self._first = failed[0]
            # Those of a run that was told to end, and has saved, are about to end by themselves.
            self._deadline = time.monotonic() + (GRACE if codes[self._first] in TOLD_TO_END else 0)
            self._next = [signal.SIGTERM, signal.SIGKILL]
        if self._next and time.monotonic() >= self._deadline:
            self._send(self._next.pop(0))
            self._deadline += PATIENCE
        return True

    def _judge(self, result: RunResult) -> None:
        """Say why the group ended; take back the restarts where another start would end in the same way."""
        first = next(iter(result.failures)) if self._first is None else self._first
        self._cause = first, result.failures[first]  # the others have ended for its sake
        kind, why = self._reason()
        if kind == UserError.__name__ or self._told_to_end():
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            limit = self._worker_group.spec.max_restarts
            count = limit - self._remaining_restarts + 1
            say(f"unmask: {why}; restart {count} of {limit}, from the last checkpoint", file=sys.stderr, flush=True)
            self._worker_group.spec.args = (*self._command, "--restarted", why)

    def _told_to_end(self) -> bool:
        return self._received is not None or (self._cause is not None and self._cause[1].exitcode in TOLD_TO_END)

    def _reason(self) -> tuple[str, str]:
        """(kind of exception or "", what happened) of the failure that came first."""
        assert self._cause is not None
        rank, failure = self._cause
        recorded = failure.error_file_data["message"]
        if isinstance(recorded, dict):
            kind, _, sentence = recorded["message"].partition(": ")
            return kind, sentence
        if failure.exitcode < 0:
            return "", f"rank {rank} was killed by {failure.signal_name()}"
        return "", f"rank {rank} ended with exit code {failure.exitcode}"

    def verdict(self) -> int:
        """The exit code of a group that has failed; UserError where that is told in a sentence."""
        assert self._cause is not None
        if self._received is not None:
            return 128 + self._received
        if self._told_to_end():
            return TOLD_TO_END[self._cause[1].exitcode]
        kind, why = self._reason()
        limit = self._worker_group.spec.max_restarts
        if kind == UserError.__name__:
            raise UserError(why)
        if self._cause[1].exitcode > 0 and kind != RankLost.__name__:
            say(f"unmask: {why}" + (f", after {limit} restarts" if limit else ""), file=sys.stderr)
            return self._cause[1].exitcode
        given_up = f"given up after {limit} restart{'s' * (limit > 1)}: " if limit else ""
        raise UserError(f"{why}; {given_up}start it again to resume from the last checkpoint")


def _exit_code(pid: int) -> int | None:
    """What a child ended with (negative: the signal that killed it), which is left for others to collect; None while it
    runs."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # collected by torchelastic, which goes on only past those that ended well
        return 0
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


@contextmanager
def _environment(size: int) -> Iterator[None]:
    """What the processes inherit: a share of the cores each, and the loopback interface to talk through."""
    given = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        given |= {"GLOO_SOCKET_IFNAME": loopback[0], "NCCL_SOCKET_IFNAME": loopback[0]}
    added = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(added)
    # torchelastic tells every signal and failure in its own words.
    log = logging.getLogger("torch.distributed.elastic")
    silent, log.propagate = logging.NullHandler(), False
    log.addHandler(silent)
    try:
        yield
    finally:
        log.removeHandler(silent)
        log.propagate = True
        for name in added:
            del os.environ[name]
