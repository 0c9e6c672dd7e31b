"""Wire: point-to-point messages between the ranks of one mesh axis, counted in bytes and in seconds waited.

Every exchange is made of rounds. In a round a rank posts what it sends and what it receives, goes on computing, and
waits only when it needs what arrives. All ranks post the same rounds in the same order, so messages between two ranks
match by their order, on gloo as on NCCL and RCCL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: (rank of the axis, tensor): the tensor is contiguous; an empty one is not sent.
Message = tuple[int, Tensor]


@dataclass
class Traffic:
    """What this rank sent, in bytes by kind, and how many seconds it waited for what had not arrived."""

    sent: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    _events: list[Any] = field(default_factory=list)

    def count(self, kind: str, tensors: Sequence[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size:
            self.sent[kind] = self.sent.get(kind, 0) + size

    def read(self) -> tuple[dict[str, int], float]:
        """(bytes by kind, seconds) since the last reading."""
        for before, after in self._events:
            after.synchronize()
            self.waited += before.elapsed_time(after) / 1000
        sent, waited = self.sent, self.waited
        self.sent, self.waited, self._events = {}, 0.0, []
        return sent, waited


class Round:
    """The messages of one round, under way."""

    def __init__(self, wire: Wire, works: list[Any], kept: list[Tensor]):
        self._wire, self._works, self._kept = wire, works, kept

    def wait(self) -> None:
        """Return when everything has been sent and has arrived (on a GPU: when the stream may use it)."""
        if not self._works:
            return
        traffic = self._wire.traffic
        if self._kept[0].device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            self._complete()
            events[1].record()
            traffic._events.append(events)
        else:
            start = time.perf_counter()
            self._complete()
            traffic.waited += time.perf_counter() - start

    def _complete(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._kept = [], []


class Wire:
    """One axis. groups: process groups over the same ranks; with two, messages to higher ranks go through the first and
    to lower ones through the second (a gloo connection carries one direction well, and each group has its own).
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], traffic: Traffic | None = None):
        self.groups = list(groups)
        self.traffic = traffic or Traffic()
        self.rank, self.size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])

    def post(self, kind: str, sends: Sequence[Message], receives: Sequence[Message]) -> Round:
        """Begin a round; `kind` names its bytes in the counters."""
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
        tensors = [tensor for _, tensor in (*sends, *receives)]
        self.traffic.count(kind, [tensor for _, tensor in sends])
        if not tensors:
            return Round(self, [], [])
        if tensors[0].device.type == "cuda":
            operations: list[tuple[Any, Sequence[Message]]] = [(dist.isend, sends), (dist.irecv, receives)]
            works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(operation, tensor, group=self.groups[0], group_peer=peer)
                    for operation, messages in operations
                    for peer, tensor in messages
                ]
            )
        else:
            works = [
                dist.irecv(tensor, group=self._towards(peer < self.rank), group_src=peer) for peer, tensor in receives
            ]
            works += [
                dist.isend(tensor, group=self._towards(peer > self.rank), group_dst=peer) for peer, tensor in sends
            ]
        return Round(self, works, tensors)

    def _towards(self, higher: bool) -> dist.ProcessGroup:
        return self.groups[0 if higher else -1]
