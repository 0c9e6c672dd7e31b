"""Deterministic mode: torch may use only algorithms that give the same bits every time.

On one machine a run is a function of its config without it as far as our own code goes: data, noise and order are. What
is left are torch's kernels that add up in an order of their own, on GPUs above all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: cuBLAS gives the same bits only with workspaces of a fixed size, read from here before its first use.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Switch torch to deterministic algorithms for as long as the block lasts; one without a choice raises in torch."""
    if not wanted:
        yield
        return
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE[0])
    os.environ.setdefault(*WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ[WORKSPACE[0]]
