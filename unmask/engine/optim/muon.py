"""Muon for the matrices inside of layers and AdamW for everything else, as one optimiser.

    m  <- momentum * m + (1 - momentum) * g
    u   = momentum * m + (1 - momentum) * g   (Nesterov; without it u = m)
    W  <- (1 - lr * decay) * W - lr * scale * NS(u)

NS takes u / |u| through ns_steps of X <- a X + (b A + c A A) X, A = X X^T, in bf16: with u = U S V^T it comes close to
U V^T. scale = 0.2 * sqrt(max(rows, columns)) makes an update's root mean square AdamW's, so that AdamW's learning rate
and decay carry over (`match_rms_adamw`); `original` is sqrt(max(1, rows / columns)).

Sources: Jordan et al., Muon (kellerjordan.github.io/posts/muon, 2024); Moonlight, Liu et al. 2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from unmask.config import OptimizerConfig
from unmask.engine.optim.optimizers import adamw
from unmask.errors import UserError


class MuonAdamW(Optimizer):
    """torch.optim.Muon for groups of role "hidden", torch.optim.AdamW for the others; state and groups are in one
    place, so that it is saved, resumed, unscaled and scheduled as any other."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig):
        hidden = [group for group in groups if group["role"] == "hidden"]
        if not hidden:
            raise UserError("optimizer.name=muon: the model has no matrix inside of its layers; use adamw")
        divided = any(isinstance(each, DTensor) for group in hidden for each in group["params"])
        muon = (DividedMuon if divided else torch.optim.Muon)(
            hidden,
            lr=config.muon_learning_rate or config.learning_rate,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.ns_steps,
            adjust_lr_fn=config.adjust_lr,
        )
        others = [group for group in groups if group["role"] != "hidden"]
        self._parts: dict[bool, Optimizer] = {True: muon}
        if others:
            self._parts[False] = adamw(others, config)
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        for hidden, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if (group["role"] == "hidden") == hidden]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loading a state dict ends here, with new groups and states."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self._parts.values():
            part.step()
        return loss


class DividedMuon(torch.optim.Muon):
    """torch.optim.Muon for divided matrices: every rank gathers u, one matrix at a time, and takes its part of NS(u).

    The momentum stays divided.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        whole = (gradient.lerp(mean, momentum) if group["nesterov"] else mean).full_tensor()
        change = torch.zeros_like(whole)
        change.grad = whole
        same = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([change], weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        # Without src_data_rank every rank takes its part of its own copy: nothing is sent.
        parameter.add_(distribute_tensor(change, parameter.device_mesh, parameter.placements, src_data_rank=None))
