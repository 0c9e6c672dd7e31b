"""Evaluations that run in one process: their model, on the device that is there."""

from __future__ import annotations

import os
from pathlib import Path

from unmask.errors import UserError
from unmask.models.checkpoints import OpenModel, open_model


def alone(what: str) -> None:
    """UserError in one of several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"eval {what} runs in one process: start it without torchrun")


def open_here(checkpoint: str | Path) -> OpenModel:
    """The checkpoint's model, on the GPU if there is one."""
    import torch

    return open_model(checkpoint, device="cuda" if torch.cuda.is_available() else "cpu")
