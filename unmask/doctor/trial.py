"""A training of a few steps and a sample, on the device that a run would take: does everything work together?"""

from __future__ import annotations

import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unmask.hardware import default_device

STEPS = 8
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def attempt() -> tuple[dict[str, Any], list[str]]:
    """Facts of the trial, and a sentence where it failed."""
    try:
        return _trained(), []
    except Exception as error:  # whatever is broken here: to find it is what the trial is for
        lines = str(error).strip().splitlines() or [""]
        return {"ok": False}, [f"a training step and a sample failed: {type(error).__name__}: {lines[0]}"]


def _trained() -> dict[str, Any]:
    """Counting upwards, learnt from a few lines of numbers: the loss must fall."""
    from unmask import Config, Trainer, load, sample

    began = time.perf_counter()
    losses: list[float] = []
    with TemporaryDirectory(prefix="unmask-") as folder:
        run = Path(folder) / "run"
        tree = {
            "model": {"config": MODEL, "mask_token_id": 63},
            "data": {"pack_tokens": 256},
            "objective": {"name": "block_diffusion", "block_size": 8},
            "optimizer": {"learning_rate": 0.01},
            "training": {"steps": STEPS, "batch_size": 2},
            "checkpoint": {"path": str(run)},
            "log": {"console": "none"},
        }
        texts = [{"input_ids": [(first + place) % 60 for place in range(64)]} for first in range(32)]
        trainer = Trainer(
            config=Config.parse(tree, "doctor"), callbacks=[lambda _, record: losses.append(record["loss"])]
        )
        trainer.train(texts)
        opened = load(run, device=default_device())
        answer = sample(opened.model, None, [1, 2, 3], decoding=opened.objective.decoding, length=8)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise RuntimeError(f"the losses {losses} do not fall")
    if len(answer.token) != 8:
        raise RuntimeError(f"the sample has {len(answer.token)} tokens, not 8")
    return {"ok": True, "seconds": time.perf_counter() - began, "first_loss": losses[0], "last_loss": losses[-1]}
