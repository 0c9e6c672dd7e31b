"""The loss scale of fp16 where processes hold parts of the gradient (torch.amp.GradScaler where each holds all of it).

torch's own ShardedGradScaler counts overflows in a tensor of one element, which the fused AdamW does not take.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from unmask.engine.ema import local


class SharedScaler(torch.amp.GradScaler):
    """An overflow that one process of `group` sees in its part of the gradient is one of all: scales stay the same."""

    def __init__(self, device: str, group: dist.ProcessGroup, enabled: bool):
        super().__init__(device, enabled=enabled)
        self.group = group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """As torch's, of what this process holds: its own takes no gradients of several meshes together."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found: dict[torch.device, torch.Tensor] = {}
        for (device, _), gradients in kinds.items():
            overflow = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inv_scale.to(device))
        return found

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            found: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
            for overflow in found.values():
                dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.group)
