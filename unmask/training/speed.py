"""How fast a step was: tokens per second, model FLOP utilisation and memory.

MFU = (6 * parameters * rows + 12 * width * pairs) / seconds / peak, from the exact pair counts of the rows. What is not
computed (a last layer's unlabelled rows) and what is computed twice (recomputed activations) count as no work. A GPU's
peak is its data sheet's dense rate, a CPU's that of a measured matrix product.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unmask.hardware import matrix_rate, peak_memory
from unmask.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from unmask.engine.engine import Engine

#: Dense TFLOP/s by device name: (bf16 and fp16, fp32 as torch runs it without TF32).
GPUS = {
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "GH200": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "V100": (125.0, 15.7),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.4, 163.4),
    "MI250": (362.1, 45.3),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s this device can reach in `dtype`; None for a GPU that is not in the table."""
    if device.type == "cpu":
        return matrix_rate(device, dtype, size=768, seconds=0.03)
    name = torch.cuda.get_device_name(device)
    half = dtype in (torch.bfloat16, torch.float16)
    for known in sorted(GPUS, key=len, reverse=True):
        if known in name:
            return GPUS[known][0 if half else 1] * 1e12
    return None


def memory(device: torch.device) -> int:
    """Peak bytes: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory()


def of_ranks(engine: Engine) -> dict[str, list[Any]]:
    """What each rank did since the last reading, in lists by rank; nothing for one process."""
    mesh = engine.mesh
    if mesh.size == 1:
        return {}
    sent, waited = mesh.traffic.read()
    mine = {"rank_sent": sent, "rank_waited": waited, "rank_memory": memory(mesh.device)}
    if engine.block_axis is not None:
        mine |= engine.block_axis.read()
    if isinstance(engine.module, Pipeline):
        mine |= engine.module.read()
    everyone = mesh.gathered(mine)
    return {key: [theirs[key] for theirs in everyone] for key in mine}


@dataclass
class Meter:
    """Tokens, FLOPs and seconds of the steps since the last reading; what happens between steps is not counted."""

    device: torch.device
    dtype: torch.dtype
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    _peak: float | None = None
    _measured: bool = False
    _started: float = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def add(self, tokens: int, flops: float) -> None:
        """The step begun by `start` is over; its loss was read, so that a GPU has finished it too."""
        self.seconds += time.perf_counter() - self._started
        self.tokens += tokens
        self.flops += flops

    def read(self) -> dict[str, float | int | None]:
        """tokens_per_second, mfu (a fraction) and memory (bytes) since the last call."""
        if not self._measured:
            self._peak, self._measured = peak_flops(self.device, self.dtype), True
        mfu = self.flops / self.seconds / self._peak if self._peak else None
        speed = {"tokens_per_second": self.tokens / self.seconds, "mfu": mfu, "memory": memory(self.device)}
        self.tokens, self.flops, self.seconds = 0, 0.0, 0.0
        return speed
