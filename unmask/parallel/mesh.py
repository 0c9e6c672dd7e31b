"""The mesh: which process is which rank of which axis, and the process groups they talk through.

Axes, outermost first: `replicate` (copies of the model that share a batch) and `block` (ranks that share a pack).
Processes are started by torchrun or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from unmask.attention.exchange import Axis, Traffic, Wire
from unmask.config import ParallelConfig
from unmask.errors import UserError
from unmask.parallel.pulse import Pulse

T = TypeVar("T")

#: What torch says when the other end of a collective is gone or silent.
CONNECTION = ("onnection", "imed out", "imeout", "peer", "NCCL", "gloo", "Socket")


@dataclass
class Mesh:
    """This process's place; the same methods for one process.

    sizes, position: by axis name; axis: the block axis for attention (None where it has one rank).
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    sizes: dict[str, int] = field(default_factory=lambda: {"replicate": 1, "block": 1})
    position: dict[str, int] = field(default_factory=lambda: {"replicate": 0, "block": 0})
    axis: Axis | None = None
    pulse: Pulse | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes the log and the checkpoints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in fp64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maxima over all processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, op=operation)
        return total.tolist()

    def gathered(self, value: Any) -> list[Any]:
        """`value` of every process, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """What `action` returns; a UserError of one process is raised by all, with its rank where others had none."""
        value, error = None, None
        try:
            value = action()
        except UserError as caught:
            if self.size == 1:
                raise
            error = str(caught)
        errors = self.gathered(error)
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if failed:
            text = errors[failed[0]]
            raise UserError(text if len(failed) == self.size else f"rank {failed[0]}: {text}", shared=True)
        return cast(T, value)

    def first_does(self, action: Callable[[], Any]) -> None:
        """The first process acts while the others wait; they raise its UserError too."""
        errors: list[str | None] = [None]
        if self.first:
            try:
                action()
            except UserError as caught:
                if self.size == 1:
                    raise
                errors = [str(caught)]
        if self.size > 1:
            dist.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise UserError(errors[0], shared=True)

    def agree(self, facts: dict[str, Any]) -> None:
        """UserError when two processes were given different facts, naming the first one and the rank."""
        everyone = self.gathered(facts)
        for rank, theirs in enumerate(everyone):
            for key in [*everyone[0], *theirs]:
                ours, other = everyone[0].get(key), theirs.get(key)
                if ours != other:
                    short = max(len(str(ours)), len(str(other))) < 200
                    difference = (
                        f"{key} is {other} there and {ours} on rank 0" if short else f"{key} is not that of rank 0"
                    )
                    raise UserError(f"rank {rank} was started with another configuration: {difference}", shared=True)

    def close(self) -> None:
        """Wait for what is still on its way."""
        if self.axis is not None:
            for wire in filter(None, (self.axis.wire, self.axis.within, self.axis.between)):
                wire.close()

    def __post_init__(self) -> None:
        assert self.size == self.sizes["replicate"] * self.sizes["block"]


def world_size() -> int:
    """How many processes were started together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_sizes(config: ParallelConfig, processes: int | None = None) -> None:
    """UserError when the axes do not multiply to the number of processes."""
    processes = world_size() if processes is None else processes
    product = config.data_parallel_size * config.block_parallel_size
    if product != processes:
        axes = "data_parallel_size", "block_parallel_size"
        sizes = " x ".join(f"parallel.{axis}={getattr(config, axis)}" for axis in axes)
        raise UserError(
            f"{sizes} asks for {product} processes, and {processes} "
            f"{'was' if processes == 1 else 'were'} started: torchrun --nproc-per-node {product} -m unmask train ..."
        )


@contextmanager
def started(config: ParallelConfig, device: torch.device) -> Iterator[Mesh]:
    """The mesh of a run, for as long as it lasts. A rank that is lost ends the block with a UserError that names it."""
    check_sizes(config)
    if world_size() == 1:
        yield Mesh(device)
        return
    timeout = timedelta(seconds=config.timeout)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"parallel: the processes did not find each other: {first_line(error)}") from error
    try:
        with Pulse(store, rank, size) as pulse:
            mesh = _mesh(config, device)
            mesh.pulse = pulse
            try:
                yield mesh
            except RuntimeError as error:
                raise lost(mesh, error) from error
            finally:
                mesh.close()
    finally:
        dist.destroy_process_group()


def lost(mesh: Mesh, error: RuntimeError) -> Exception:
    """A UserError where the cause of `error` is another process that is gone or silent, else the error itself."""
    text = first_line(error)
    if not any(sign in text for sign in CONNECTION):
        return error
    silent = mesh.pulse.silent() if mesh.pulse is not None else []
    who = "rank " + ", ".join(map(str, silent)) + " no longer answers" if silent else "a rank no longer answers"
    return UserError(
        f"rank {mesh.rank} stopped: {who} ({text}); look at its messages, and start all ranks again to go on from the "
        f"last checkpoint"
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _mesh(config: ParallelConfig, device: torch.device) -> Mesh:
    rank, size = dist.get_rank(), dist.get_world_size()
    blocks = config.block_parallel_size
    sizes = {"replicate": config.data_parallel_size, "block": blocks}
    position = {"replicate": rank // blocks, "block": rank % blocks}
    timeout = timedelta(seconds=config.timeout)
    axis = None
    if blocks > 1:
        traffic = Traffic()
        packs = [list(range(first, first + blocks)) for first in range(0, size, blocks)]
        wire = _wire(packs, rank, traffic, timeout)
        within = between = None
        node = config.node_size
        if node is not None and 1 < node < blocks:
            within = _wire(
                [pack[i : i + node] for pack in packs for i in range(0, blocks, node)], rank, traffic, timeout
            )
            between = _wire([pack[i::node] for pack in packs for i in range(node)], rank, traffic, timeout)
        axis = Axis(wire, within, between, traffic)
    return Mesh(device, rank, size, sizes, position, axis)


def _wire(members: list[list[int]], rank: int, traffic: Traffic, timeout: timedelta) -> Wire:
    """The wire of this rank's row of `members`. All processes make all groups, in one order."""
    own: list[Any] = []
    for ranks in members:
        for _ in range(1 if dist.get_backend() == "nccl" else 2):
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                own.append(group)
    return Wire(own, traffic)
