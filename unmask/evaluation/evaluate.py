"""`evaluate`: the likelihood bound of a checkpoint on files, folders or prepared datasets.

Started by torchrun, the processes share the packs of every set, and every process returns the whole result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.config import DataConfig, EvaluationConfig, ParallelConfig, TrainingConfig
from unmask.data import Packs, Sampler, dataset_from
from unmask.data.beginnings import beginning, shown
from unmask.data.sources import exists
from unmask.errors import UserError
from unmask.evaluation.bound import Bound, Level, Measured, Share, measure, text_bytes
from unmask.hardware import default_device
from unmask.models import RowModel
from unmask.models.positions import check_positions
from unmask.objectives import Objective, rebuild
from unmask.parallel.mesh import Mesh, started
from unmask.processes.group import world_size
from unmask.rows import Document
from unmask.runs.open import OpenModel, open_model
from unmask.terminal import say


@dataclass(frozen=True)
class Evaluation:
    """A bound; bits_per_byte is None without a tokeniser to turn tokens into text.

    ar: the next-token likelihood of the same weights under causal attention, where it was asked for.
    """

    measured: Measured
    bits_per_byte: float | None
    ar: Evaluation | None = None

    @property
    def bound(self) -> Bound:
        return self.measured.bound

    def by_level(self, bins: int) -> list[Level]:
        """The loss by noise level, in `bins` bins; UserError where there was no noise."""
        if not len(self.measured.level):
            raise UserError("eval: an autoregressive model has no noise levels; leave --levels out")
        return self.measured.by_level(bins)

    def asdict(self, levels: int = 0) -> dict[str, Any]:
        """Plain values; levels: also the loss by noise level, in so many bins."""
        found: dict[str, Any] = {**self.bound.asdict(), "bits_per_byte": self.bits_per_byte}
        found |= {"ar": self.ar.asdict()} if self.ar is not None else {}
        return found | ({"levels": [level.asdict() for level in self.by_level(levels)]} if levels else {})


@dataclass(frozen=True)
class Scope:
    """draws: noise draws per chunk; packs: how many to take, 0 for all, chosen by `seed`; ar: also measure the
    next-token likelihood; objective, mask_token_id: of the model, where its folder does not say (`open_model`)."""

    draws: int = 1
    packs: int = 0
    pack_tokens: int = 4096
    seed: int = 0
    ar: bool = False
    objective: str | Objective | None = None
    mask_token_id: int | None = None


def evaluate(
    checkpoint: str | Path, data: Any, *, report: Callable[[int, int], None] | None = None, **scope: Any
) -> Evaluation:
    """The bound of `checkpoint` on `data` (whatever `dataset_from` takes). scope: a `Scope`; report: see `measure`."""
    return evaluate_sets(checkpoint, {"": data}, report=report, **scope)[""]


def evaluate_sets(
    checkpoint: str | Path, data: Mapping[str, Any], *, report: Callable[[int, int], None] | None = None, **scope: Any
) -> dict[str, Evaluation]:
    """`evaluate` for several sets, by name; all are opened before the first runs. report: over all of them."""
    import torch

    of = Scope(**scope)
    EvaluationConfig.parse({"draws": of.draws, "packs": of.packs}, "evaluate")
    DataConfig.parse({"pack_tokens": of.pack_tokens}, "evaluate")
    TrainingConfig.parse({"seed": of.seed}, "evaluate")
    device = default_device()
    with started(ParallelConfig(data_parallel_size=world_size()), torch.device(device)) as mesh:
        own: dict[str, Any] = {"mask_token_id": of.mask_token_id, "objective": of.objective}
        opened = mesh.together(lambda: open_model(checkpoint, device=device, **own))
        for note in opened.notes if mesh.first else ():
            say(note, file=sys.stderr)
        row_model = RowModel(opened.model)
        objectives = [opened.objective, *([rebuild("ar", {})] if of.ar else [])]
        chosen = mesh.together(lambda: {name: _packs(source, opened, of) for name, source in data.items()})
        found: dict[str, Evaluation] = {}
        before, total = 0, len(objectives) * sum(map(len, chosen.values()))
        for name, its in chosen.items():
            made: Evaluation | None = None
            for objective in reversed(objectives):

                def count(done: int, _: int, before: int = before) -> None:
                    if report is not None:
                        report(before + done, total)

                try:
                    measured = measure(
                        row_model, objective, its, seed=of.seed, draws=of.draws, report=count, share=shared(mesh)
                    )
                except NotImplementedError as error:
                    raise UserError(f"{checkpoint}: {error}") from None
                except UserError as error:
                    raise UserError(f"{data[name]}: {error}") from None
                bits = _bits_per_byte(measured.bound, its, opened.tokenizer, objective)
                made = Evaluation(measured, bits, made)
                before += len(its)
            assert made is not None
            found[name] = made
    return found


def shared(mesh: Mesh) -> Share:
    """All who share a batch divide the packs."""
    return Share(*mesh.part, mesh.gathered)


def _packs(source: Any, opened: OpenModel, of: Scope) -> list[list[Document]]:
    if isinstance(source, str | Path) and not exists(source):
        raise UserError(f"{source}: no such dataset, file or folder")
    where = str(source) if isinstance(source, str | Path) else "evaluate"
    dataset = dataset_from(source, opened.tokenizer)
    dataset.check_rows(opened.model.get_input_embeddings().weight.shape[0], opened.tokenizer, where)
    available = Packs(dataset, of.pack_tokens, name=where)
    check_positions(opened.model, available.longest, where, "--pack-tokens (pack_tokens=...)")
    notes = available.notes("--pack-tokens")
    if dataset.texts and dataset.bos != beginning(opened.tokenizer):
        notes.append(
            f"its documents do not begin as the model's texts do (bos: {shown(opened.tokenizer)}): prepare again"
        )
    for note in notes if os.environ.get("RANK", "0") == "0" else ():
        say(f"unmask: {where}: {note}", file=sys.stderr)
    return Sampler(available, min(of.packs or len(available), len(available)), of.seed).batch(0)


def _bits_per_byte(
    bound: Bound, packs: Sequence[Sequence[Document]], tokenizer: Any, objective: Objective
) -> float | None:
    """Over the bytes of what the objective scores; None without a tokeniser."""
    documents = (document for pack in packs for document in pack)
    scored = text_bytes(documents, tokenizer, objective) if tokenizer is not None else 0
    return bound.bits_per_byte(scored) if scored else None


def named(data: Sequence[str]) -> dict[str, str]:
    """From a command line's paths and name=path; a path without a name is its own."""
    found: dict[str, str] = {}
    for text in data:
        name, sign, path = text.partition("=")
        if not sign or exists(text):
            name, path = text, text
        if not name or not path:
            raise UserError(f"--data {text!r}: write name=path, such as --data code=data/code")
        if name in found:
            raise UserError(f"--data {text!r}: {name!r} is named twice; give every set a name of its own")
        found[name] = path
    return found
