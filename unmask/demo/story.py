"""The demo from the first line to the last: corpus, both trainings, the fills, and what was learnt."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from unmask import Config, Trainer
from unmask.data import Packs, Sampler, load_tokenizer, open_dataset, prepare, train_tokenizer
from unmask.demo.corpus import stdlib_files
from unmask.demo.counts import cross_entropies
from unmask.demo.examples import examples_from, show_infilling
from unmask.demo.settings import FIRST, OPEN, VOCABULARY, Settings, autoregressive, diffusion
from unmask.demo.watch import Watch
from unmask.errors import UserError, counted
from unmask.evaluation import Bound, bound, text_bytes
from unmask.export import export
from unmask.hf import vocabulary_of
from unmask.models import RowModel, load
from unmask.models.families.bars import no_bars
from unmask.objectives import Objective, build
from unmask.rows import Document
from unmask.runs.folder import saved_steps

Precision = Literal["fp32", "bf16"]


def run(settings: Settings) -> int | None:
    """Everything, in order; the number of the signal that ended the training, if one did."""
    if not math.isfinite(settings.minutes):
        raise UserError(f"--minutes {settings.minutes}: give the minutes that the training may take")
    with no_bars():
        return _told(settings, Console(highlight=False))


def _told(settings: Settings, console: Console) -> int | None:
    files = _corpus(settings, console)
    tokenizer = load_tokenizer(settings.tokenizer)
    examples = examples_from(files[1], tokenizer)
    first = autoregressive(settings)
    packs = _held_out(first)
    documents = [document for pack in packs for document in pack]
    unigram, bigram = cross_entropies(open_dataset(settings.train), documents, vocabulary_of(tokenizer))
    table = [("token frequencies, counted", unigram), ("token pairs, counted", bigram)]
    untrained = _untrained(settings, first, packs, tokenizer, console)

    seconds = 60 * settings.minutes
    if not saved_steps(settings.out) or saved_steps(settings.first):
        console.rule("1 of 2: an autoregressive model")
        later = 0.0 if settings.steps else (1 - FIRST) * seconds
        watch = Watch("next-token", FIRST * seconds, console, later=later)
        ended, likelihood = _train(first, watch, settings)
        if likelihood is None:
            return ended
        table.append(("autoregressive model", likelihood))
    if not saved_steps(settings.out):
        export(settings.first, settings.exported, force=True)
    console.rule("2 of 2: a diffusion model, converted from it")
    watch = Watch("masked-token", (1 - FIRST) * seconds, console, examples)
    ended, converted = _train(diffusion(settings, first), watch, settings)
    if converted is None:
        return ended
    table += [("diffusion model, untrained (bound)", untrained), ("diffusion model, converted (bound)", converted)]
    if show_infilling(settings.out, examples, console):
        # Fast-dLLM v2's bound scores the same tokens.
        _print(table, text_bytes(documents, tokenizer, build(first.objective.chosen)), console)
        _go_on(settings, console)
    return None


def _train(config: Config, watch: Watch, settings: Settings) -> tuple[int | None, Bound | None]:
    """Train, or go on; (the signal that ended it, if one did, else the likelihood on the held-out files)."""
    watch.fixed = config.training.steps != OPEN
    console = watch.console
    with watch:
        summary = Trainer(config=config, callbacks=[watch]).train()
    if summary.interrupted is not None:
        again = f"unmask demo --out {settings.out}"
        if settings.minutes != Settings.minutes:
            again += f" --minutes {settings.minutes:g}"
        of = f" of {summary.steps}" if summary.steps != OPEN else ""
        console.print(f"Stopped at step {summary.step}{of}, and saved. To resume:", style="bold")
        console.print(f"  {again}", markup=False, soft_wrap=True)
        return summary.interrupted, None
    console.print(f"{counted(summary.steps, 'step')} done; the model is in {summary.checkpoint}")
    return None, summary.validation


# what is trained on what


def _corpus(settings: Settings, console: Console) -> tuple[list[Path], list[Path]]:
    """The standard library's files (training, held out), their tokeniser and datasets; made where they are missing."""
    out = settings.out
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not settings.tokenizer.is_dir())):
        raise UserError(f"{out}: exists and is not a demo's folder; name another with --out")
    train, held_out = stdlib_files()
    if settings.files:
        train, held_out = train[: settings.files], held_out[: settings.files]
    began = time.monotonic()
    if not settings.tokenizer.is_dir():
        size, number = sum(path.stat().st_size for path in train) / 1e6, counted(len(train), "file")
        console.print(f"Training a tokeniser on {number} of the standard library ({size:.1f} MB) ...")
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in train)
        train_tokenizer(texts, VOCABULARY, settings.tokenizer)
    for files, target in ((train, settings.train), (held_out, settings.held_out)):
        if not target.exists():
            # A file that is not UTF-8 is left out.
            manifest = prepare(files, target, settings.tokenizer, skip_bad=True)
            console.print(f"{target}: {counted(manifest.documents, 'file')}, {counted(manifest.tokens, 'token')}")
    console.print(f"data ready in {time.monotonic() - began:.0f} s")
    return train, held_out


def quicker_precision(row_model: RowModel, objective: Objective, pack: list[Document]) -> Precision:
    """bf16 or fp32, whichever takes a pack forward and backward in less time on this machine."""
    if row_model.device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    batch = row_model.collate(objective.rows(pack, 0).pruned())
    taken: dict[Precision, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(3):
        for precision, times in taken.items():
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                terms = row_model(batch, objective)
            terms.sum.backward()
            times.append(time.perf_counter() - start)
    row_model.zero_grad()
    return min(taken, key=lambda precision: min(taken[precision]))


def _held_out(config: Config) -> list[list[Document]]:
    """The packs that the trainer will evaluate."""
    packs = Packs(open_dataset(str(config.data.validation)), config.data.pack_tokens)
    return Sampler(packs, min(config.evaluation.packs, len(packs)), config.training.seed).batch(0)


def _untrained(
    settings: Settings, first: Config, packs: list[list[Document]], tokenizer: Any, console: Console
) -> Bound:
    """The diffusion bound of the model as the first run starts it. A new run also gets the precision quicker here."""
    seed, second = first.training.seed, diffusion(settings, first)
    loaded = load(first.model, tokenizer, seed=seed, vocab_size=vocabulary_of(tokenizer))
    objective = build(second.objective.chosen, second.objective.options())
    objective = objective.model_copy(update={"mask_token_id": loaded.mask_token_id})
    row_model = RowModel(loaded.model)
    if first.training.steps == OPEN:
        first.training.precision = quicker_precision(row_model, objective, packs[0])
    size = sum(parameter.numel() for parameter in loaded.model.parameters()) / 1e6
    console.print(f"model: {size:.1f} million parameters, {first.training.precision}")
    return bound(row_model, objective, packs, seed=seed, draws=second.evaluation.draws)


# the end


def _print(table: list[tuple[str, Bound]], count: int, console: Console) -> None:
    """The table; count: bytes of the held-out text."""
    view = Table(title=f"On held-out files ({table[0][1].tokens:,} tokens)", title_justify="left")
    for column in ("", "nats per token", "bits per byte"):
        view.add_column(column, justify="right" if column else "left")
    for name, found in table:
        error = "" if math.isnan(found.standard_error) else f" +- {found.standard_error:.3f}"
        nats = f"{found.nats_per_token:.3f}{error}"
        view.add_row(name, nats, f"{found.bits_per_byte(count):.3f}")
    console.print(view)


def _go_on(settings: Settings, console: Console) -> None:
    out = settings.out
    console.print("Next:", style="bold")
    for command in (
        f'unmask sample {out} length=64 temperature=0.7 --prompt "def main():"',
        f'unmask sample {out} length=12 --prompt "for i in " --suffix "    total += i"',
        f"unmask eval {out} --data {settings.held_out}",
        f"unmask export {out} {out}-hf",
        f"unmask train {out / 'config.yaml'} training.steps=5000",
    ):
        console.print(f"  {command}", markup=False, soft_wrap=True)
