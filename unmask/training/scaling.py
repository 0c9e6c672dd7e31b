"""The loss scale of fp16 where processes hold parts of the gradient (torch.amp.GradScaler where each holds all of it).

torch's own ShardedGradScaler counts overflows in a tensor of one element, which the fused AdamW does not take.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class SharedScaler(torch.amp.GradScaler):
    """An overflow that one process of `group` sees in its part of the gradient is one of all: scales stay the same."""

    def __init__(self, device: str, group: dist.ProcessGroup, enabled: bool):
        super().__init__(device, enabled=enabled)
        self.group = group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            found: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
            for overflow in found.values():
                dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.group)
