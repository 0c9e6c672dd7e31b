"""Optimisers of parameters in half precision: each updates a copy in fp32, the master, and the model takes it rounded.

    master <- update(master, gradient),     parameter <- round(master)

Without one an update below half the distance of two numbers is lost: in bf16 a weight of 1 takes none below 2^-9, ten
times AdamW's at a learning rate of 3e-4 (Micikevicius et al. 1710.03740, section 3.1). The copies are part of the
optimiser's state: divided as their parameters are, saved and taken up with it. Its other state is that of fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: The dtypes of parameters that have a master.
HALF = (torch.bfloat16, torch.float16)
#: The master's name in the state of its parameter.
MASTER = "master"
#: Elements whose gradients are in fp32 at a time.
CHUNK = 2**26


def masters(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The fp32 copies that an optimiser updates, by parameter; of parameters in full precision it has none."""
    return optimizer.masters if isinstance(optimizer, Mastered) else {}


def mastered(groups: list[dict[str, Any]], make: Callable[[list[dict[str, Any]]], Optimizer]) -> Optimizer:
    """make(groups), over masters in place of the parameters that are in half precision, where there are any."""
    if not any(parameter.dtype in HALF for group in groups for parameter in group["params"]):
        return make(groups)
    return Mastered(groups, make)


def notes(model: nn.Module) -> list[str]:
    """What becomes of the parameters that are trained in half precision."""
    found = {each.dtype for each in model.parameters() if each.requires_grad} & set(HALF)
    return [
        f"model.dtype={str(dtype).removeprefix('torch.')}: the optimiser updates a copy of such parameters in fp32 "
        f"(4 bytes each), and the model takes it rounded"
        for dtype in found
    ]


class Mastered(Optimizer):
    """What `make` builds, over fp32 copies; parameters in full precision it updates itself.

    State of a parameter: the inner optimiser's, and `master`, fp32 of the parameter's shape.
    """

    def __init__(self, groups: list[dict[str, Any]], make: Callable[[list[dict[str, Any]]], Optimizer]):
        self.masters: dict[Tensor, Tensor] = {
            parameter: parameter.detach().to(torch.float32, copy=True)
            for group in groups
            for parameter in group["params"]
            if parameter.dtype in HALF
        }
        self.inner = make([{**group, "params": [self._inner(each) for each in group["params"]]} for group in groups])
        owner = {self._inner(each): each for group in groups for each in group["params"]}
        own = [{**group, "params": [owner[each] for each in group["params"]]} for group in self.inner.param_groups]
        super().__init__(own, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})
        gradients = {each: each.grad for each in self._parameters() if each.grad is not None}
        for parameter in gradients:
            parameter.grad = None  # or the inner optimiser would update it with every part
        for part in _parts(list(gradients)):
            for parameter in part:
                inner = self._inner(parameter)
                inner.grad = gradients[parameter].to(inner.dtype)
            self.inner.step()
            for parameter in part:
                self._take(parameter)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast every state to its parameter's dtype. Masters that it lacks start from the
        parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for key, parameter in zip(saved, self._parameters(), strict=True):
            if key in state_dict["state"]:
                state = dict(state_dict["state"][key])
                if parameter in self.masters:
                    self.masters[parameter].copy_(state.pop(MASTER, parameter.detach()))
                self.inner.state[self._inner(parameter)] = state
                self._show(parameter)

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _inner(self, parameter: Tensor) -> Tensor:
        return self.masters.get(parameter, parameter)

    def _take(self, parameter: Tensor) -> None:
        """The model's parameter, and what is shown of its state, after an update."""
        inner = self._inner(parameter)
        inner.grad = None
        if inner is not parameter:
            parameter.copy_(inner)
        self._show(parameter)

    def _show(self, parameter: Tensor) -> None:
        inner = self._inner(parameter)
        own = {} if inner is parameter else {MASTER: inner}
        self.state[parameter] = {**own, **self.inner.state.get(inner, {})}


def _parts(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in order, in parts of CHUNK elements or of one; alike on all ranks."""
    part: list[Tensor] = []
    for parameter in parameters:
        if part and sum(each.numel() for each in part) + parameter.numel() > CHUNK:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
