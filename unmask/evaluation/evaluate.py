"""`evaluate`: the likelihood bound of a checkpoint on a file, folder or prepared dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.config import DataConfig, EvaluationConfig, TrainingConfig
from unmask.data import Packs, Sampler, dataset_from
from unmask.data.sources import exists
from unmask.errors import UserError
from unmask.evaluation.bound import Bound, bound, text_bytes
from unmask.models import RowModel
from unmask.models.checkpoints import open_model


@dataclass(frozen=True)
class Evaluation:
    """A bound; bits_per_byte is None without a tokeniser to turn tokens into text."""

    bound: Bound
    bits_per_byte: float | None

    def asdict(self) -> dict[str, Any]:
        return {**self.bound.asdict(), "bits_per_byte": self.bits_per_byte}

    def sentence(self) -> str:
        found = self.bound
        error = "(one chunk: no standard error)" if found.chunks < 2 else f"+- {found.standard_error:.4f}"
        text = f"{found.nats_per_token:.4f} {error} nats per token"
        if self.bits_per_byte is not None:
            text += f", {self.bits_per_byte:.4f} bits per byte"
        chunks = "1 chunk" if found.chunks == 1 else f"{found.chunks:,} chunks"
        return f"{text} ({found.tokens:,} tokens in {chunks})"


def evaluate(
    checkpoint: str | Path,
    data: Any,
    *,
    draws: int = 1,
    packs: int = 0,
    pack_tokens: int = 4096,
    seed: int = 0,
    report: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """The bound of `checkpoint` on `data` (whatever `dataset_from` takes).

    draws: noise draws per chunk; packs: how many to take, 0 for all, chosen by `seed`; report: see `bound`.
    """
    import torch

    EvaluationConfig.parse({"draws": draws, "packs": packs}, "evaluate")
    DataConfig.parse({"pack_tokens": pack_tokens}, "evaluate")
    TrainingConfig.parse({"seed": seed}, "evaluate")

    opened = open_model(checkpoint, device="cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(data, str | Path) and not exists(data):
        raise UserError(f"{data}: no such dataset, file or folder")
    available = Packs(dataset_from(data, opened.tokenizer), pack_tokens)
    chosen = Sampler(available, min(packs or len(available), len(available)), seed).batch(0)
    try:
        found = bound(RowModel(opened.model), opened.objective, chosen, seed=seed, draws=draws, report=report)
    except NotImplementedError as error:
        raise UserError(f"{checkpoint}: {error}") from None
    scored = 0
    if opened.tokenizer is not None:
        scored = text_bytes((document for pack in chosen for document in pack), opened.tokenizer)
    return Evaluation(found, found.bits_per_byte(scored) if scored else None)
