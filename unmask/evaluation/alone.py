"""Evaluations that run in one process: their model, on the device that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from unmask.errors import UserError
from unmask.runs.open import OpenModel, open_model
from unmask.sampling.options import Options
from unmask.terminal import say


def alone(what: str) -> None:
    """UserError in one of several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"eval {what} runs in one process: start it without torchrun")


def open_here(checkpoint: str | Path, options: Options) -> OpenModel:
    """The checkpoint's model, on the GPU if there is one; what should be known of it goes to stderr."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened = open_model(checkpoint, device=device, mask_token_id=options.mask_token_id, objective=options.trained_by())
    for note in opened.notes:
        say(note, file=sys.stderr)
    return opened
