"""What checkpointing keeps for the backward pass waits in the CPU's memory: `training.offload_activations`.

    forward    layer 1 | layer 2 | layer 3 ...      each input is copied out beside the computation that follows
    backward   ... layer 3 | layer 2 | layer 1      while a layer is computed again, what the one before kept comes back

Copies run on a stream of their own from and to pinned memory. The device then holds what two layers kept, not all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Transfers(Protocol):
    """Copies between a device and the memory where tensors wait."""

    def out(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor out; its own memory is free once that is done."""
        ...

    def back(self, waiting: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Begin to copy it back; what is returned gives the copy to the computation, once it is there."""
        ...


class Streams:
    """A CUDA or HIP stream beside the computation's; `out` and `back` follow each other on it."""

    def __init__(self, device: torch.device):
        self.side = torch.cuda.Stream(device)

    def out(self, tensor: Tensor) -> Tensor:
        waiting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.side):
            waiting.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.side)
        return waiting

    def back(self, waiting: Tensor, device: torch.device) -> Callable[[], Tensor]:
        with torch.cuda.stream(self.side):
            copy = waiting.to(device, non_blocking=True)
            there = self.side.record_event()

        def ready() -> Tensor:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(there)
            copy.record_stream(stream)
            return copy

        return ready


class InTurn:
    """Plain copies to `memory`; the dry run's, whose tensors have no data."""

    def __init__(self, memory: str = "cpu"):
        self.memory = memory

    def out(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self.memory).copy_(tensor)

    def back(self, waiting: Tensor, device: torch.device) -> Callable[[], Tensor]:
        copy = torch.empty_like(waiting, device=device).copy_(waiting)
        return lambda: copy


class Kept:
    """A tensor of layer `layer` that waits. `before`: the one that was put just before it."""

    def __init__(self, waiting: Tensor, device: torch.device, layer: int, before: Kept | None):
        self.waiting, self.device, self.layer = waiting, device, layer
        self.before: Callable[[], Kept | None] = (lambda: None) if before is None else weakref.ref(before)
        self.coming: Callable[[], Tensor] | None = None
        self.taken = False


class Offload:
    """Tensors put away in the forward pass and taken back in the backward pass, the last layer's first."""

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.layer = 0
        self._last: Callable[[], Kept | None] = lambda: None

    @torch.no_grad()
    def put(self, tensor: Tensor) -> Kept:
        kept = Kept(self.transfers.out(tensor.detach()), tensor.device, self.layer, self._last())
        self._last = weakref.ref(kept)
        return kept

    @torch.no_grad()
    def take(self, kept: Kept) -> Tensor:
        """The tensor on its device; what the layer before kept sets out, for it is wanted next."""
        tensor = self._fetched(kept)()
        kept.coming, kept.taken = None, True
        each = kept.before()
        while each is not None and each.layer >= kept.layer - 1:
            if not each.taken:
                self._fetched(each)
            each = each.before()
        return tensor

    def _fetched(self, kept: Kept) -> Callable[[], Tensor]:
        if kept.coming is None:
            kept.coming = self.transfers.back(kept.waiting, kept.device)
        return kept.coming

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointing function whose tensor arguments wait; what it saves inside of itself is not touched."""

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            self.layer += 1
            with saved_tensors_hooks(self.put, self.take):
                return checkpoint(*args, **kwargs)

        return checkpointed

    def keeping(self, operation: Any) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """A `context_fn` of torch's checkpointing by which results of `operation` wait, and are not computed again."""

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            results: list[Any] = []
            return _Keeping(self, operation, results), _Giving(self, operation, results)

        return contexts


class _Watching(TorchDispatchMode):
    """results: of `operation`, in the order of the forward pass."""

    def __init__(self, offload: Offload, operation: Any, results: list[Any]):
        super().__init__()
        self.offload, self.operation, self.results = offload, operation, results


class _Keeping(_Watching):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is self.operation:
            self.results.append(tree_map_only(Tensor, self.offload.put, made))
        return made


class _Giving(_Watching):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operation:
            return tree_map_only(Kept, self.offload.take, self.results.pop(0))
        return func(*args, **(kwargs or {}))
