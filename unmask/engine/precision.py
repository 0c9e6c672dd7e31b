"""In which arithmetic forward passes run: that of the parameters, or autocast to half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.config import Config

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """dtype: of the matrix products; autocast: whether parameters are kept in more bits. Calling it gives the context
    that a forward pass runs in."""

    device: torch.device
    dtype: torch.dtype
    autocast: bool

    @classmethod
    def of(cls, config: Config, device: torch.device) -> Precision:
        half = HALF.get(config.training.precision)
        return cls(device, half or getattr(torch, config.model.dtype), half is not None)

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype if self.autocast else None, enabled=self.autocast)
