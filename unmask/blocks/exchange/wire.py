"""Wire: point-to-point messages between the ranks of one mesh axis, counted in bytes and in seconds waited.

Every exchange is made of rounds. In a round a rank posts what it sends and what it receives, goes on computing, and
waits only when it needs what arrives. All ranks post the same rounds in the same order, so messages between two ranks
match by their order, on gloo as on NCCL and RCCL.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: (rank of the axis, tensor): the tensor is contiguous; an empty one is not sent.
Message = tuple[int, Tensor]

#: Rounds under way at a time: one on the network, and the next ready to follow.
AHEAD = 2


@dataclass
class Traffic:
    """What this rank sent, in bytes by kind, and how many seconds it waited for what had not arrived."""

    sent: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    #: On a GPU: pairs of events around each wait.
    stalls: list[Any] = field(default_factory=list)

    def count(self, kind: str, tensors: Sequence[Tensor]) -> None:
        self.add(kind, sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def add(self, kind: str, size: int) -> None:
        """`size` more bytes of a kind."""
        if size:
            self.sent[kind] = self.sent.get(kind, 0) + size

    def read(self) -> tuple[dict[str, int], float]:
        """(bytes by kind, seconds) since the last reading."""
        for before, after in self.stalls:
            after.synchronize()
            self.waited += before.elapsed_time(after) / 1000
        sent, waited = self.sent, self.waited
        self.sent, self.waited, self.stalls = {}, 0.0, []
        return sent, waited


class Round:
    """The messages of one round: sends and receives of (rank of the axis, tensor)."""

    def __init__(self, wire: Wire, sends: list[Message], receives: list[Message]):
        self.sends, self.receives = sends, receives
        self._wire = wire
        self._works: list[Any] = []
        self._over = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return when everything has been sent and has arrived (on a GPU: when the stream may use it)."""
        if not self.sends and not self.receives:
            return
        traffic = self._wire.traffic
        if self._wire.cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            self.finish()
            events[1].record()
            traffic.stalls.append(events)
        else:
            start = time.perf_counter()
            self._over.wait()
            traffic.waited += time.perf_counter() - start
            if self._error is not None:
                raise self._error

    def start(self) -> None:
        """Hand the messages to torch.distributed."""
        groups, rank = self._wire.groups, self._wire.rank
        if self._wire.cuda:
            group = groups[0]
            operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in self.sends]
            operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in self.receives]
            self._works = dist.batch_isend_irecv(operations)
        else:
            up, down = groups[0], groups[-1]
            works = [dist.irecv(x, group=up if peer < rank else down, group_src=peer) for peer, x in self.receives]
            works += [dist.isend(x, group=up if peer > rank else down, group_dst=peer) for peer, x in self.sends]
            self._works = works

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def let_go(self, error: BaseException | None) -> None:
        """Let go whoever waits; with an error, it is raised there."""
        self._error = error
        self._over.set()


class Wire:
    """One axis. groups: process groups over the same ranks; with two, messages to higher ranks go through the first and
    to lower ones through the second (a gloo connection carries one direction well, and each group has its own).

    On a CPU a thread starts the rounds in the order they were posted, AHEAD at a time at most: the network works while
    this process computes, and pieces arrive one after another rather than all at the end. On a GPU a stream of the
    communication library does the same.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], traffic: Traffic | None = None):
        self.groups = list(groups)
        self.traffic = traffic or Traffic()
        self.rank, self.size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self.cuda = False
        self._queue: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, kind: str, sends: Sequence[Message], receives: Sequence[Message]) -> Round:
        """Begin a round; `kind` names its bytes in the counters."""
        round_ = Round(
            self,
            [(peer, tensor) for peer, tensor in sends if tensor.numel()],
            [(peer, tensor) for peer, tensor in receives if tensor.numel()],
        )
        self.traffic.count(kind, [tensor for _, tensor in round_.sends])
        messages = round_.sends + round_.receives
        if not messages:
            return round_
        self.cuda = messages[0][1].device.type == "cuda"
        if self.cuda:
            round_.start()
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=_pump, args=(self._queue,), name="wire", daemon=True)
                self._thread.start()
            self._queue.put(round_)
        return round_

    def close(self) -> None:
        """End the thread, once everything posted is over (after an error it may never be: the thread is let go)."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)
            self._thread = None


def _pump(rounds: queue.SimpleQueue[Round | None]) -> None:
    """Start rounds in order, AHEAD at a time; after a failure let everybody go with it."""
    under_way: collections.deque[Round] = collections.deque()
    failure: BaseException | None = None
    while True:
        try:
            posted = rounds.get(block=not under_way)
        except queue.Empty:
            failure = _finish(under_way.popleft(), failure)
            continue
        if posted is None:
            break
        failure = _after(failure, posted.start)
        under_way.append(posted)
        while len(under_way) >= AHEAD or (failure is not None and under_way):
            failure = _finish(under_way.popleft(), failure)
    while under_way:
        failure = _finish(under_way.popleft(), failure)


def _finish(round_: Round, failure: BaseException | None) -> BaseException | None:
    failure = _after(failure, round_.finish)
    round_.let_go(failure)
    return failure


def _after(failure: BaseException | None, action: Callable[[], None]) -> BaseException | None:
    """Act unless something failed before; what has failed by then. Whoever waits for the round raises it."""
    if failure is None:
        try:
            action()
        except Exception as error:
            return error
    return failure
