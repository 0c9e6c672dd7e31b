"""Models that are built without weights, divided, and only then filled: every process reads its own part.

    build, parameters on `meta`  >  prove on a miniature, fuse, divide  >  fill

Buffers are there from the start: they are computed, and no axis divides them. What needs the values of whole weights
before a model is divided has them filled first (`fill` of a module): the embedding and the head, where they gain a row
or the mask token's row is trained by itself. Random weights are drawn whole, and weights that are quantised or have
DoRA's magnitudes are read whole (`needs_whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unmask.endings import passing
from unmask.errors import UserError
from unmask.models.families.layout import Part
from unmask.models.families.stored import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.config import AdapterConfig

META = torch.device("meta")
#: What peft puts into the name of a weight that has an adapter.
ADAPTED = ".base_layer."


#: Fills tensors, by their names in the model; of a DTensor the part that this process holds. UserError for files that
#: are no longer what they were.
Read = Callable[[Mapping[str, Tensor]], None]


class Unread(NamedTuple):
    """What a model keeps until it is filled.

    names: of each parameter, by every name it has, the one that `read` knows; device: where it will be.
    """

    read: Read
    names: dict[str, str]
    device: torch.device = torch.device("cpu")


def needs_whole(lora: AdapterConfig) -> bool:
    """Whether the weights of a model must be read whole before anything divides it."""
    return lora.dora or lora.quantize != "none"


@contextmanager
def without_values() -> Iterator[None]:
    """Within the context modules are made with parameters on `meta`, and real buffers."""
    kind: Any = nn.Module
    register = kind.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device != META:  # one that is tied stays the same
            parameter = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
        register(module, name, parameter)

    kind.register_parameter = on_meta
    try:
        yield
    finally:
        kind.register_parameter = register


def leave(model: PreTrainedModel, read: Read) -> None:
    """Read a model's buffers, and leave its parameters for `fill`."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(each, name) for name, each in model.named_parameters(remove_duplicate=False)}
    vars(model)["unread"] = Unread(read, names)
    stored = model.state_dict().keys()
    read({name: buffer for name, buffer in model.named_buffers() if name in stored})


def is_unread(model: nn.Module) -> bool:
    """Whether a model has parameters without values."""
    return any(parameter.device == META for parameter in model.parameters())


def device_of(model: nn.Module) -> torch.device:
    """Where a model is, or will be once it is filled."""
    device, unread = next(model.parameters()).device, vars(model).get("unread")
    return device if device != META or unread is None else unread.device


@torch.no_grad()
def fill(model: nn.Module, device: torch.device | str | None = None, only: Sequence[nn.Module | None] = ()) -> None:
    """Read what this process holds of the parameters without values; nothing where there are none.

    device: if another than that of `move`; only: of these modules. FSDP2 takes up the parameters that take the places
    of its own before its first forward. UserError for a file that is no longer what it was.
    """
    unread: Unread | None = vars(model).get("unread")
    if unread is None:
        return
    chosen = {each for module in only if module is not None for each in module.parameters()}
    wanted: dict[str, Tensor] = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module, name, parameter in _without(model):
        if only and parameter not in chosen:
            continue
        if parameter not in made:
            made[parameter] = nn.Parameter(
                torch.empty_like(parameter, device=device or unread.device), parameter.requires_grad
            )
            wanted[unread.names[path.replace(ADAPTED, ".")]] = made[parameter]
        module._parameters[name] = made[parameter]
    if wanted:
        unread.read(wanted)
    if not only:
        del vars(model)["unread"]


def move(model: nn.Module, device: torch.device | str) -> None:
    """`model.to(device)` of what has values, and of the others once they are read."""
    if (unread := vars(model).get("unread")) is not None:
        vars(model)["unread"] = unread._replace(device=torch.device(device))
    model._apply(lambda tensor: tensor if tensor.device == META else tensor.to(device))


@contextmanager
def stand_ins(model: nn.Module, device: torch.device | str, layers: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Within the context parameters without values have some: random ones, which layers that are alike share.

    Without layers, all values of a parameter are one zero: enough for who asks for no more than shapes.
    """
    layers, shared = list(layers), {}  # type: ignore[var-annotated]
    alike = {each: (path, each.shape) for layer in layers for path, each in layer.named_parameters()}
    held = [(module, name, parameter) for _, module, name, parameter in _without(model)]
    made: dict[Any, nn.Parameter] = {}
    generator = torch.Generator().manual_seed(0)
    for module, name, parameter in held:
        if parameter not in made:
            values = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            if layers:
                like = shared.setdefault(alike.get(parameter, parameter), parameter)
                values = made[like].data if like in made else _random(parameter, generator).to(device)
            made[parameter] = nn.Parameter(values, parameter.requires_grad)
        module._parameters[name] = made[parameter]
    try:
        yield
    finally:
        for module, name, parameter in held:
            parameter.requires_grad_(made[parameter].requires_grad)
            module._parameters[name] = parameter


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randn(like.shape, generator=generator) * 0.02).to(like.dtype)


def _without(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """(name in the model, module, name there, parameter) of every place of a parameter without values."""
    return [
        (f"{path}.{name}" if path else name, module, name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.device == META
    ]


class FolderSource:
    """The tensors of a folder of safetensors, by the parts that a model has of them; those it lacks are zero."""

    def __init__(self, parts: Iterable[Part], stored: Stored):
        self.stored = stored
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part.ours, []).append(part)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        self.stored.check_unchanged()
        places = [(part, tensor) for name, tensor in tensors.items() for part in self.parts[name]]
        order = {name: number for number, name in enumerate(self.stored.file)}  # file by file
        places.sort(key=lambda place: order.get(place[0].theirs, -1))
        try:
            with passing():
                for part, tensor in places:
                    self._copy(part, tensor)
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.name={self.stored.folder}: cannot be read any more: {error}") from None
        finally:
            self.stored.close()

    def _copy(self, part: Part, tensor: Tensor) -> None:
        """Copy what `part` has of the box of the tensor that is here."""
        start, here = _held(tensor)
        inside: list[int | slice] = []  # of what is here
        theirs: list[slice] = []
        at = (*part.at, *(slice(None),) * (tensor.ndim - len(part.at)))
        for index, size, first, length in zip(at, tensor.shape, start, here.shape, strict=True):
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
        here[tuple(inside)] = self.stored.piece(part.theirs, theirs) if part.theirs in self.stored.file else 0.0


def _held(tensor: Tensor) -> tuple[Iterable[int], Tensor]:
    """(where it begins in the whole, the tensor) of what this process holds of one."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()
    return chunk.offsets, tensor.to_local().detach()
