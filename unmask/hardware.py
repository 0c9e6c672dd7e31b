"""What the machine is, how fast it multiplies and how much memory this process has taken."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def default_device() -> str:
    """The device of this process where none is named: of several on one machine, each takes the GPU of its number."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if several else "cuda"


@cache
def processor() -> str:
    """The processor's name as the system tells it."""
    file = Path("/proc/cpuinfo")
    names = [line for line in file.read_text().splitlines() if line.startswith("model name")] if file.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def matrix_rate(device: torch.device | str, dtype: torch.dtype, size: int, seconds: float) -> float:
    """FLOP/s of the best of the products of two square matrices that fit into `seconds`, at least three."""
    import torch

    matrix = torch.full((size, size), 0.5, dtype=dtype, device=device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.perf_counter()
        torch.mm(matrix, matrix)[0, 0].item()  # on a GPU the only way to know that it is done
        taken.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(taken)


def peak_memory() -> int:
    """Most bytes that this process has had in memory.

    Linux's VmHWM where there is one: getrusage's maximum begins with that of the program that started this one.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
