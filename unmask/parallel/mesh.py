"""The mesh: which process is which rank of which axis, and the process groups they talk through.

Axes, outermost first: `pipeline` (ranks that the layers are assigned to), `replicate` (copies of the model that share
a batch), `shard` (ranks that a copy is divided over, which share the batch as well), `block` (ranks that share a pack)
and `tensor` (ranks that share every layer). FSDP2 divides over `shard x block`. Experts are divided over neighbours of
replicate x shard x block.
Processes are started by `unmask train --nproc`, torchrun, or anything that `unmask.processes.launched` understands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_tensor

from unmask.blocks.exchange import Axis, Traffic, Wire
from unmask.config import ParallelConfig, flat, rules
from unmask.errors import UserError
from unmask.processes.group import initialised, naming, world_size
from unmask.processes.pulse import Pulse

T = TypeVar("T")

#: Outermost first.
AXES = ("pipeline", "replicate", "shard", "block", "tensor")


@dataclass
class Mesh:
    """This process's place; the same methods for one process.

    sizes, position: by axis name; axis: the block axis for attention (None where it has one rank); shards: what FSDP2
    works on (None without), replicate x (shard x block) or the latter alone; tensor: the tensor axis, of the same root
    (None where it has one rank); experts, expert_shards: the same two for the experts of layers. Groups: group of all
    processes (None: torch's default group), data of those with this one's place on the tensor axis, stage of those that
    hold the same layers and parts of them, pipeline of those that a pack passes through, by stage, ends of the first
    and the last of these (None elsewhere), saving of all, for checkpoints in the background. traffic: what this process
    sends.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    position: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 0))
    axis: Axis | None = None
    shards: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None
    pulse: Pulse | None = None
    group: Any = None
    data: Any = None
    stage: Any = None
    pipeline: Any = None
    ends: Any = None
    saving: Any = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def first(self) -> bool:
        """Whether this process writes the log and the checkpoints."""
        return self.rank == 0

    @property
    def divided(self) -> bool:
        """Whether a process holds only parts of the model, of its gradient and of a checkpoint."""
        return self.shards is not None or self.sizes["pipeline"] > 1

    @property
    def part(self) -> tuple[int, int]:
        """(r, R): this process takes part r of R of a batch."""
        sizes, position = self.sizes, self.position
        return position["replicate"] * sizes["shard"] + position["shard"], sizes["replicate"] * sizes["shard"]

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in fp64; of ranks that share every layer, and so all values, over one."""
        return self._reduced(values, dist.ReduceOp.SUM, self.data)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maxima over all processes."""
        return self._reduced(values, dist.ReduceOp.MAX, self.group)

    def _reduced(self, values: Sequence[float], operation: Any, group: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, op=operation, group=group)
        return total.tolist()

    def gathered(self, value: Any) -> list[Any]:
        """`value` of every process, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """What `action` returns here. A UserError of one process is raised by all of them, with its rank."""
        value, error = self._tried(action)
        errors = self.gathered(error)
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if failed:
            who = "" if len(failed) == self.size else f"rank {failed[0]}: "
            raise UserError(who + errors[failed[0]], told=not self.first)
        return cast(T, value)

    def by_first(self, action: Callable[[], Any]) -> None:
        """Let the first process act while the others wait; its UserError is raised by all of them."""
        error = self.gathered(self._tried(action)[1] if self.first else None)[0]
        if error is not None:
            raise UserError(error, told=not self.first)

    def _tried(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """What `action` returns, or the sentence of its UserError for the other processes, if there are any."""
        try:
            return action(), None
        except UserError as caught:
            if self.size == 1:
                raise
            return None, str(caught)

    def by_writers(self, action: Callable[[], Any]) -> None:
        """Done by the first process, where it holds the whole model, else by all."""
        (self.together if self.divided else self.by_first)(action)

    def agree(self, facts: dict[str, Any]) -> None:
        """UserError when two processes were given different facts, naming the first one and the rank."""
        first, *others = self.gathered(dict(flat(facts)))
        for rank, theirs in enumerate(others, 1):
            for key in [*first, *theirs]:
                ours, other = first.get(key), theirs.get(key)
                if ours != other:
                    short = max(len(str(ours)), len(str(other))) < 200
                    difference = (
                        f"{key} is {other} there and {ours} on rank 0" if short else f"{key} is not that of rank 0"
                    )
                    raise UserError(
                        f"rank {rank} was started with another configuration: {difference}; give all ranks the same",
                        told=not self.first,
                    )

    def naming(self) -> AbstractContextManager[None]:
        """See `unmask.processes.group.naming`."""
        return naming(self.pulse, self.rank)

    def close(self) -> None:
        """Wait for what is still on its way."""
        if self.axis is not None:
            for wire in filter(None, (self.axis.wire, self.axis.within, self.axis.between)):
                wire.close()

    def __post_init__(self) -> None:
        assert self.size == math.prod(self.sizes.values())


def _sizes(config: ParallelConfig) -> dict[str, int]:
    sizes = (config.pipeline_stages, config.data_parallel_size, config.shard_size)
    return dict(zip(AXES, (*sizes, config.block_parallel_size, config.model_parallel_size), strict=True))


@contextmanager
def started(config: ParallelConfig, device: torch.device) -> Iterator[Mesh]:
    """The mesh of a run, for as long as it lasts. A rank that is lost ends the block with a UserError that names it.

    A program that has initialised torch.distributed itself keeps its groups: the mesh makes its own over the same
    processes and takes them down.
    """
    rules.check(rules.Known(parallel=config, processes=world_size()))
    if world_size() == 1:
        yield Mesh(device)
    elif dist.is_initialized():
        with _made(config, device) as mesh, mesh.naming():
            yield mesh
    else:
        with initialised(device, config.timeout) as pulse, _made(config, device) as mesh, pulse:
            mesh.pulse = pulse
            with mesh.naming():
                yield mesh


@contextmanager
def _made(config: ParallelConfig, device: torch.device) -> Iterator[Mesh]:
    """The mesh and its process groups, which all processes make in one order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    node = config.node_size
    sizes = _sizes(config)
    ranks = torch.arange(size).reshape(*sizes.values())
    position = dict(zip(sizes, torch.nonzero(ranks == rank)[0].tolist(), strict=True))
    timeout, traffic = timedelta(seconds=config.timeout), Traffic()
    made: list[dist.ProcessGroup] = []

    def group(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The one of `members` that this rank is in."""
        for ranks in members:
            new = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                made.append(new)
        return made[-1]

    def wire(members: Sequence[Sequence[int]]) -> Wire:
        return Wire([group(members) for _ in range(1 if device.type == "cuda" else 2)], traffic)

    mesh = Mesh(device, rank, size, sizes, position, group=group([range(size)]), traffic=traffic)
    mesh.data = mesh.group
    if sizes["tensor"] > 1:
        mesh.data = group(ranks.flatten(0, 3).T.tolist())
    mesh.stage = mesh.data
    if sizes["pipeline"] > 1:
        mesh.stage = group(ranks.flatten(1, 3).transpose(1, 2).flatten(0, 1).tolist())
        lines = ranks.flatten(1).T.tolist()
        mesh.pipeline = group(lines)
        ends = [[line[0], line[-1]] for line in lines]
        mine = group([*ends, *([rank] for line in lines for rank in line[1:-1])])
        mesh.ends = mine if position["pipeline"] in (0, sizes["pipeline"] - 1) else None
    experts = config.expert_parallel_size
    if config.level or sizes["tensor"] > 1 or experts > 1:
        layouts = ranks.reshape(sizes["pipeline"], -1, config.shards if config.level else 1, sizes["tensor"])
        mesh.shards, mesh.tensor = _device_meshes(mesh, layouts, "tensor", group)
    if experts > 1:
        layouts = ranks.reshape(1, -1, config.expert_shards, experts)
        mesh.expert_shards, mesh.experts = _device_meshes(mesh, layouts, "expert", group)
    if mesh.divided:
        mesh.saving = group([range(size)])
        mesh.saving = group([range(size)])
    if sizes["block"] > 1:
        packs = ranks.transpose(3, 4).flatten(0, 3).tolist()
        mesh.axis = Axis(wire(packs), traffic=traffic)
        if node is not None and 1 < node < sizes["block"]:
            mesh.axis.within = wire([pack[i : i + node] for pack in packs for i in range(0, len(pack), node)])
            mesh.axis.between = wire([pack[i::node] for pack in packs for i in range(node)])
    try:
        yield mesh
    finally:
        mesh.close()
        for each in made:
            dist.destroy_process_group(each)


@torch.no_grad()
def part_of(parameter: nn.Parameter, over: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part of a parameter that all ranks hold alike, so that none asks another, in memory of its own."""
    value = distribute_tensor(parameter.detach(), over, [placement], src_data_rank=None)
    local = value.to_local()
    if local.untyped_storage().nbytes() > local.nbytes:  # a view, which would keep the whole
        local.data = local.clone()
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _device_meshes(
    mesh: Mesh, layouts: Tensor, inner: str, group: Callable[[Sequence[Sequence[int]]], dist.ProcessGroup]
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(what FSDP2 works on, the axis `inner` or None where it has one rank), parts of one DeviceMesh.

    layouts: ranks [stages, copies, shards, inner]; FSDP2 divides over shards what the inner axis has left.
    """
    lines = {
        "replicate": layouts.permute(0, 2, 3, 1).flatten(0, 2),
        "shard": layouts.transpose(2, 3).flatten(0, 2),
        inner: layouts.flatten(0, 2),
    }
    layout = layouts[mesh.position["pipeline"]]
    kept = [axis for axis, length in zip(lines, layout.shape, strict=True) if axis == "shard" or length > 1]
    groups = {axis: group(lines[axis].tolist()) for axis in kept}
    # Named after their groups: torch caches what it knows of a mesh by its names, also past the end of a run.
    names = {axis: f"{axis}-{each.group_name}" for axis, each in groups.items()}
    shape = [length for axis, length in zip(lines, layout.shape, strict=True) if axis in kept]
    root = DeviceMesh.from_group(
        list(groups.values()) if len(groups) > 1 else next(iter(groups.values())),
        *(mesh.device.type, layout.reshape(shape)), mesh_dim_names=tuple(names.values()),
    )  # fmt: skip
    divided = root[tuple(names[axis] for axis in kept if axis != inner)]
    return divided, root[names[inner]] if inner in kept else None
