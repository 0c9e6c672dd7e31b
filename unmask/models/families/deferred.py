"""Weights that a rank reads after the model has been divided: of every tensor its own part, and nothing else.

Until then the decoder's layers stand on the weights of the first of their kind. These are real, so what is tried on a
model before it is divided (attention, fused kernels, the division itself, the time of a layer) computes with numbers
that a model has. So a process holds the model's ends (embedding, head, last norm), a layer of each kind, its share, and
the slice that it reads. Slices are found and placed by torch DCP, as when a run is resumed on other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from unmask.endings import passing
from unmask.errors import UserError
from unmask.models.decoder import decoder_layers
from unmask.models.families.layout import Part
from unmask.models.families.stored import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What peft puts into the name of a weight that has an adapter.
ADAPTED = ".base_layer."


class Deferred:
    """What a loaded model still lacks: `load` takes note of it here, `read` reads it.

    names: the parameters, by transformers' names; empty where the model was loaded whole.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.parts: dict[str, list[Part]] = {}
        self.stored: Stored | None = None
        #: The weights that layers share, kept until each has its own: their addresses must not be given away.
        self._lent: list[Tensor] = []

    def lend(self, model: PreTrainedModel, parts: Iterable[Part], stored: Stored) -> None:
        """Let every layer stand on the weights of the first of its kind. parts: of the model in `stored`."""
        first: dict[tuple[str, torch.Size], nn.Parameter] = {}
        name_of = {parameter: name for name, parameter in model.named_parameters()}
        later = set()
        for layer in decoder_layers(model):
            for path, parameter in layer.named_parameters():
                own = first.setdefault((path, parameter.shape), parameter)
                if own is not parameter:
                    parameter.data = own.data
                    later.add(name_of[parameter])
        self.names, self.stored = frozenset(later), stored
        self._lent = [parameter.data for parameter in first.values()]
        for part in parts:
            if part.ours in later:
                self.parts.setdefault(part.ours, []).append(part)

    def move(self, model: PreTrainedModel, device: str | torch.device) -> None:
        """`model.to(device)`, after which layers still share what they shared."""
        moved: dict[int, Tensor] = {}
        for parameter in model.parameters():
            address = parameter.data_ptr()
            if address not in moved:
                moved[address] = parameter.data.to(device)
            parameter.data = moved[address]
        self._lent = [moved[lent.data_ptr()] for lent in self._lent]
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    @torch.no_grad()
    def read(self, model: nn.Module) -> None:
        """Fill what was deferred of the parameters that this process holds, each in memory of its own.

        UserError for a file that is no longer what it was.
        """
        import torch.distributed.checkpoint as dcp

        assert self.stored is not None
        lent = {each.data_ptr() for each in self._lent}
        wanted: dict[str, Any] = {}
        for path, parameter in model.named_parameters():
            name = path.replace(ADAPTED, ".")
            if name in self.names:
                wanted[name] = parameter
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if local.data_ptr() in lent:
                    local.data = torch.empty_like(local)
        if wanted:
            self.stored.check_unchanged()
            try:
                with passing():
                    dcp.load(wanted, storage_reader=_Reader(self.parts, self.stored, wanted), no_dist=True)
            except (OSError, SafetensorError, dcp.CheckpointException) as error:
                # DCP's own message holds the traceback of every rank's failure, of which here there is one.
                reason = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
                raise UserError(f"model.name={self.stored.folder}: cannot be read any more: {reason}") from None
        self._lent, self.stored = [], None


class _Reader(StorageReader):
    """Reads slices of transformers' tensors from the parts that a checkpoint has of them."""

    def __init__(self, parts: dict[str, list[Part]], stored: Stored, wanted: dict[str, Tensor]):
        self.parts, self.stored = parts, stored
        self.shape = {name: tensor.shape for name, tensor in wanted.items()}
        self.dtype = {name: tensor.dtype for name, tensor in wanted.items()}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=self.dtype[name]),
                    shape,
                    [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)],
                )
                for name, shape in self.shape.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name = item.storage_index.fqn
            target = planner.resolve_tensor(item).detach()
            for part in self.parts[name]:
                self._copy(part, item.storage_offsets, target, self.shape[name])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _copy(self, part: Part, start: torch.Size, target: Tensor, shape: torch.Size) -> None:
        """Copy what `part` has of the box of ours that begins at `start` and is as large as `target`."""
        inside: list[int | slice] = []  # of the target
        theirs: list[slice] = []
        at = (*part.at, *(slice(None),) * (len(shape) - len(part.at)))
        for index, size, first, length in zip(at, shape, start, target.shape, strict=True):
            low, high = (index, index + 1) if isinstance(index, int) else index.indices(size)[:2]
            begin, end = max(low, first), min(high, first + length)
            if begin >= end:
                return
            if isinstance(index, int):
                inside.append(begin - first)
                continue
            inside.append(slice(begin - first, end - first))
            theirs.append(slice(begin - low, end - low))
        if part.rows is not None:
            theirs[0] = slice(theirs[0].start + part.rows[0], theirs[0].stop + part.rows[0])
        target[tuple(inside)] = self.stored.piece(part.theirs, theirs) if part.theirs in self.stored.file else 0.0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Files are opened as slices are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
