"""An exponential moving average of the weights, for evaluation, sampling and export.

    average <- decay_s * average + (1 - decay_s) * weights,     decay_s = min(decay, (1 + s) / (10 + s))

after update s = 0, 1, ...; it starts from the weights the run starts from. The ramp keeps the random start from
outweighing a short run. A skipped update changes nothing. Averages are kept in fp32, of fp64 weights in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """The averages of a model's trainable parameters, by name, beside the live ones."""

    def __init__(self, model: nn.Module, decay: float, masters: Mapping[Tensor, Tensor] | None = None):
        """masters: the fp32 copies of parameters that are in fewer bits, which are averaged in their place."""
        self.decay, self.masters = decay, masters or {}
        self.live = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.average = {name: average_of(parameter) for name, parameter in self.live.items()}

    def update(self, step: int) -> None:
        """Take in the weights after update `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [local(average) for average in self.average.values()]
        weights = [local(self._exact(name)).to(average.dtype) for name, average in self.average.items()]
        get_ema_multi_avg_fn(decay)(averages, weights, None)

    def restart(self) -> None:
        """Begin again from the live weights."""
        for name, average in self.average.items():
            average.copy_(self._exact(name))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averages in place of its weights for as long as the block lasts."""
        kept = {name: parameter.detach().clone() for name, parameter in self.live.items()}
        try:
            self._put(self.average)
            yield
        finally:
            self._put(kept)

    def _exact(self, name: str) -> Tensor:
        return self.masters.get(self.live[name], self.live[name]).detach()

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.live.items():
            parameter.copy_(values[name])


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; lists of these may be of several meshes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def average_of(parameter: Tensor) -> Tensor:
    """A copy of a parameter, in fp32 at least."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
