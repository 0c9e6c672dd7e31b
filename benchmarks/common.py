"""What the benchmarks share: workers whose steps are interleaved, and the table of figures with its verdicts.

A worker is a process of its own, so that its peak memory is its own; the parent lets the workers of a comparison take
turns, one step each, so that the machine's drift meets both sides alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Figure:
    """One measured figure and its goal. sense: ">=" or "<="."""

    figure: str
    value: float
    goal: float
    sense: str

    @property
    def holds(self) -> bool:
        return self.value >= self.goal if self.sense == ">=" else self.value <= self.goal


def shown(lines: Iterable[str]) -> int:
    """Print each line when it is there; the exit code: 130 after Ctrl-C, which leaves what was printed."""
    try:
        for line in lines:
            print(line, flush=True)
    except KeyboardInterrupt:
        print("stopped: the lines above are what was measured", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def report(figures: Iterable[Figure], as_json: bool) -> int:
    """Print each figure when it is measured, a line of a table or of JSON; the exit code: 1 when one does not hold."""
    missed = []

    def lines() -> Iterator[str]:
        for figure in figures:
            if not figure.holds:
                missed.append(figure)
            if as_json:
                yield json.dumps({**asdict(figure), "holds": figure.holds})
            else:
                verdict = "ok" if figure.holds else "MISSED"
                yield f"{figure.value:8.3f}  {figure.sense} {figure.goal:<6g}  {verdict:<6}  {figure.figure}"

    return shown(lines()) or int(bool(missed))


#: Of a benchmark of several: measures with so many rounds.
Measure = Callable[[int], Iterable[Figure]]


def run_cases(text: str | None, cases: dict[str, Measure], rounds: int, counted: str) -> int:
    """The command line of a benchmark of several cases; text: its help; rounds: of what is `counted`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"counted {counted}")
    parser.add_argument("--only", nargs="*", choices=list(cases), help="run these cases")
    arguments = parser.parse_args()

    def figures() -> Iterator[Figure]:
        start = time.perf_counter()
        for name in arguments.only or cases:
            print(f"{name} ...", file=sys.stderr, flush=True)
            yield from cases[name](arguments.rounds)
            print(f"{name} done after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    return report(figures(), arguments.json)


class Worker:
    """A process that builds `make(*arguments)` once and then runs one timed step a request."""

    def __init__(self, name: str, make: Callable[..., Callable[[], Any]], *arguments: Any):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that a worker that dies is noticed
        self.facts: dict[str, float] = self._receive()
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self, *, counted: bool = True) -> float:
        """Run one step; its wall time in seconds."""
        self._pipe.send("step")
        seconds, self.peak_bytes = self._receive()
        if counted:
            self.seconds.append(seconds)
        return seconds

    def close(self) -> None:
        self._pipe.send("stop")
        self._process.join()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit(f"benchmark worker {self.name!r} died")


def interleave(workers: list[Worker], rounds: int, warmup: int = 1) -> None:
    """`rounds` counted steps of every worker, taking turns, after `warmup` uncounted ones."""
    for number in range(warmup + rounds):
        for worker in workers:
            worker.step(counted=number >= warmup)


def ratio(slow: Worker, fast: Worker) -> float:
    """Median over rounds of slow's time over fast's: how many times faster `fast` is."""
    return statistics.median(s / f for s, f in zip(slow.seconds, fast.seconds, strict=True))


def _serve(pipe: Any, make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this process
    step = make(*arguments)
    pipe.send(getattr(step, "facts", {}))
    while pipe.recv() == "step":
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
