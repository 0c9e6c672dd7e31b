"""The memory of a training step before one is made: the step itself, run on tensors without data.

Parameters are replaced by fake tensors (shapes, no storage), two steps are made with the run's own modules, objective
and optimiser, and a ledger counts the bytes of every storage while it lives. So activation checkpointing, autocast, a
last layer that skips rows, tied weights and any optimiser are counted as they are. What an operator uses inside itself
is not seen; attention's, the largest, is added from its tiles.
"""

from __future__ import annotations

import math
import resource
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unmask.engine import activations
from unmask.engine.offload import InTurn, Offload, Transfers
from unmask.engine.optim import optimizers
from unmask.models.adapters import nf4
from unmask.models.decoder import decoder_layers, faked
from unmask.models.experts import experts_of
from unmask.parallel.expert import divided_dim
from unmask.parallel.stages import even
from unmask.parallel.tensor import divided_dims
from unmask.rows import Rows
from unmask.training.setup import Run
from unmask.training.speed import memory

#: Of what lives for a while, the part that glibc's malloc is taken to keep besides; it varies from run to run.
KEPT = 0.5


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device, of a divided model the largest part. gathered: parameters that are whole for a while, with
    their gradients; averages: of the weights (`training.ema`); activations: of the largest micro-batch, with everything
    else that lives only for a while, as if layers were not divided.

    On a CPU also allocator, an allowance for what malloc keeps after tensors have gone, and process, what is in memory
    besides (libraries, data); on a GPU both are 0, for its peak is that of the tensors alone.
    """

    parameters: int
    gradients: int
    optimizer: int
    averages: int
    gathered: int
    activations: int
    allocator: int
    process: int
    host: int = 0

    @property
    def peak(self) -> int:
        """Of the device: `host` bytes of the lasting parts are in the CPU's memory (`parallel.offload`)."""
        return sum(value for name, value in vars(self).items() if name != "host") - self.host


class Ledger(TorchDispatchMode):
    """Counts the bytes of the storages that operators make on a kind of device (None: on any), while these live."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device = device
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.enter(tensor)
        self.peak = max(self.peak, self.live + _inside(func, args))
        return made

    def enter(self, tensor: Tensor) -> None:
        """Count the tensor's storage, once; of one in four bits, those of its parts."""
        for part in nf4.stored("", tensor).values():
            storage = part.untyped_storage()
            if storage in self._seen or self.device not in (None, part.device.type):
                continue
            self._seen.add(storage)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, size: int) -> None:
        self.live -= size


def _inside(func: Any, args: Any) -> int:
    """Bytes that attention uses inside itself: the results of the largest batch of tiles, and sums in fp32."""
    if func is torch.ops.unmask.attend.default:
        (q, k, v), backward = args[:3], False
    elif func is torch.ops.unmask.attend_backward.default:
        (q, k, v), backward = args[1][:3], True
    else:
        return 0
    narrow, wide = q.element_size(), max(4, q.element_size())
    if not backward:
        return q.numel() * (narrow + (wide if narrow < wide else 0))
    every = q.numel() + k.numel() + v.numel()
    # In half precision the sums are kept in fp32, on a CPU also copies of what was saved.
    copies = 2 * q.numel() + every if q.device.type == "cpu" else 0
    return every * wide + ((every + copies) * wide if narrow < wide else 0)


def footprint(
    run: Run, micro: Sequence[Rows], elsewhere: int = 0, transfers: Transfers | None = None
) -> Footprint | None:
    """What steps take whose micro-batches on this device are `micro`. The run's model is not to be trained after.

    elsewhere: clean rows of the largest micro-batch that other ranks hold, whose keys and values come by in every
    layer. transfers: how activations are offloaded, where they are. None for an optimiser that reads values, which fake
    tensors do not have.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    resident = _resident() + sum(_size(each) for each in run.model.parameters() if each.is_meta)
    training, row_model = run.config.training, run.row_model
    largest = max(micro, key=lambda rows: (len(rows), len(rows.labelled)))
    batch = row_model.collate(largest)
    away = Offload(transfers or InTurn()) if training.offload_activations else None
    activations.apply(run.model, training.checkpointing, away)
    row_model.train()
    ledger = Ledger(run.device.type)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, faked(row_model, fake, run.device), ledger:
        parameters = list(row_model.parameters())
        for each in [*parameters, *row_model.buffers()]:
            ledger.enter(each)
        held = ledger.live
        buffers = held - sum(map(_size, parameters))
        optimizer = optimizers.build(run.model, run.config.optimizer)
        trained = [each for each in parameters if each.requires_grad]
        part = _Parts(run)
        ours = _of_stages(run, part)
        for each in trained:
            each.grad = torch.zeros_like(each)
        gradients = sum(map(_size, trained))
        try:
            optimizer.step()  # makes its state
        except DataDependentOutputException:
            return None
        states = sum(_size(value) for state in optimizer.state.values() for value in state.values())
        if len(micro) == 1:  # else those of one micro-batch are there when the next one's are added
            optimizer.zero_grad(set_to_none=True)
        ledger.peak = ledger.live
        with run.precision():
            terms = row_model(batch, run.objective)
        (terms.sum / (batch.count or 1.0)).backward()
        optimizer.step()
    widths = row_model.decoder.widths(run.precision.dtype)
    passing = 2 * elsewhere * max(each.key * (each.activation + each.gradient) for each in widths.values())
    temporary = round((max(0, ledger.peak - held - gradients - states) + passing) * _waiting(run))
    parts = [sum(part(each, each) for each in tensors if each in ours) for tensors in (parameters, trained)]
    own_states = sum(
        part(value, own) for own, state in optimizer.state.items() if own in ours for value in state.values()
    )
    averages = 0
    if training.ema:
        averages = sum(part(each, each) * max(1, 4 // each.element_size()) for each in trained if each in ours)
    lasting = (buffers + parts[0], parts[1], own_states, averages, _gathered(run))
    host = sum(lasting[:4]) - buffers if run.config.parallel.offload else 0
    if run.device.type != "cpu":
        return Footprint(*lasting, temporary, 0, 0, host)
    return Footprint(*lasting, temporary, round(KEPT * temporary), max(0, resident - held), host)


def _of_stages(run: Run, part: Callable[[Any, Any], int]) -> set[nn.Parameter]:
    """The parameters of the pipeline's rank that holds most; without a pipeline all. part: bytes of one."""
    parallel, model = run.config.parallel, run.model
    every = set(model.parameters())
    if parallel.pipeline_stages == 1:
        return every
    layers = [set(layer.parameters()) for layer in decoder_layers(model)]
    embedding, head = (set(each.parameters()) for each in (model.get_input_embeddings(), model.get_output_embeddings()))
    rest = every - set().union(*layers, embedding, head)
    layout = even(parallel, len(layers))
    held = []
    for rank in range(layout.ranks):
        stages = layout.of_rank(rank)
        ends = (embedding if 0 in stages else set()) | (head | rest if layout.stages - 1 in stages else set())
        held.append(ends.union(*(layers[number] for stage in stages for number in layout.span(stage))))
    return max(held, key=lambda parameters: sum(part(each, each) for each in parameters))


def _waiting(run: Run) -> float:
    """Activations that wait for their backward pass on a pipeline's busiest rank, in those of all layers."""
    parallel = run.config.parallel
    if parallel.pipeline_stages == 1:
        return 1.0
    ranks, micro = parallel.pipeline_stages, run.config.passes()
    # Micro-batches, each through the layers of a rank: 1F1B's first rank is `ranks` ahead, interleaved by less than
    # twice that, ZB-V as 1F1B.
    ahead = {"gpipe": micro, "interleaved": 2 * ranks}.get(parallel.schedule, ranks)
    layers = len(run.row_model.decoder.layers)
    layout = even(parallel, layers)
    most = max(sum(layout.layers[stage] for stage in layout.of_rank(rank)) for rank in range(ranks))
    return min(micro, ahead) * most / layers


def _gathered(run: Run) -> int:
    """Bytes of whole parameters and gradients while a step runs (see `unmask.parallel.shard`).

    At level 3 the layer that runs, the next ones and what belongs to no layer; the gradients of one layer, or of those.
    """
    parallel = run.config.parallel
    if not parallel.level and parallel.model_parallel_size == parallel.expert_parallel_size == 1:
        return 0
    part = _Parts(run, whole=True)

    def elements(parameters: Iterable[nn.Parameter]) -> int:
        # What is in four bits is gathered as it is, whatever the arithmetic.
        wide = run.precision.dtype.itemsize
        return sum(part(each, each) // (wide if nf4.is_nf4(each) else each.element_size()) for each in parameters)

    sizes = [elements(layer.parameters()) for layer in decoder_layers(run.model)]
    largest, every = max(sizes), elements(_of_stages(run, part))
    rest = every - sum(sizes)
    whole = every
    if parallel.level == 3:
        whole = min(every, rest + largest * (1 + max(1, parallel.prefetch)))
    gradients = every if parallel.level <= 1 else max(largest, rest)
    return whole * run.precision.dtype.itemsize + gradients * max(4, run.model.dtype.itemsize)


class _Parts:
    """part(value, parameter): bytes that the first rank holds of a parameter, or of a state of its shape.

    The tensor axis divides first, and the expert axis experts, then FSDP2 the rows of what is left. whole: not FSDP2.
    """

    def __init__(self, run: Run, whole: bool = False):
        parallel = run.config.parallel
        self.shards = 1 if whole else parallel.shards
        self.expert_shards = 1 if whole else parallel.expert_shards
        self.ranks, self.expert_ranks = parallel.model_parallel_size, parallel.expert_parallel_size
        self.dims = divided_dims(run.model) if self.ranks > 1 else {}
        divided = experts_of(run.model).values() if self.expert_ranks > 1 else ()
        self.experts = {each for module in divided for each in module.parameters()}

    def __call__(self, value: Any, parameter: Any) -> int:
        if not _size(value) or nf4.is_nf4(value):  # four bits are divided by FSDP2 alone
            return -(-_size(value) // self.shards)
        shape, dim, shards = list(value.shape), 0, self.shards
        if parameter in self.dims:
            shape[self.dims[parameter]] = -(-shape[self.dims[parameter]] // self.ranks)
        if parameter in self.experts:
            shape[0] //= self.expert_ranks
            dim, shards = divided_dim(shape, self.expert_shards), self.expert_shards
        shape[dim] = -(-shape[dim] // shards)
        return math.prod(shape) * value.element_size()


def _size(value: Any) -> int:
    """Bytes of a tensor; counters and what is no tensor count nothing."""
    if not isinstance(value, Tensor) or not value.dim():
        return 0
    return sum(part.nbytes for part in nf4.stored("", value).values())


def _resident() -> int:
    """Bytes of this process in memory now (where the system does not say: at most so far)."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return memory(torch.device("cpu"))
