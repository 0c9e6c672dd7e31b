"""`unmask demo`: a diffusion language model learns Python from this Python's own source, and fills holes in functions.

No file and no network: the standard library is the corpus. It is a normal run, made of the pieces that `unmask train`
is made of, in a folder that sample, eval, export and train go on with. Run again, it takes up what it finds there.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from unmask import Config, Trainer
from unmask import load as open_run
from unmask.data import Packs, Sampler, load_tokenizer, open_dataset, prepare, stdlib_files, train_tokenizer
from unmask.errors import UserError
from unmask.evaluation import Bound, bound, text_bytes
from unmask.models import RowModel, load
from unmask.models.checkpoints import saved_steps
from unmask.objectives import Objective, build
from unmask.rows import Document
from unmask.sampling import Canvas, sample
from unmask.sampling.display import picture

Precision = Literal["fp32", "bf16"]
VOCABULARY = 4096
#: Steps whose pace is not measured (first calls are slow), and the step after which the length of the run is fixed.
WARM, MEASURED = 3, 12
#: Stands for a length that is not known yet.
OPEN = 100_000


@dataclass(frozen=True)
class Settings:
    """minutes: of training; the rest of the demo takes about one. steps, layers, files (0: all): for small trials."""

    minutes: float = 6.0
    out: Path = Path("unmask-demo")
    seed: int = 0
    steps: int | None = None
    layers: int = 4
    files: int = 0

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer"

    @property
    def train(self) -> Path:
        return self.out / "data" / "train"

    @property
    def held_out(self) -> Path:
        return self.out / "data" / "held-out"


def run(settings: Settings) -> int | None:
    """Everything, in order; the number of the signal that ended the training, if one did."""
    if not math.isfinite(settings.minutes):
        raise UserError(f"--minutes {settings.minutes}: give the minutes that the training may take")
    console = Console(highlight=False)
    files = _corpus(settings, console)
    config = _config(settings)
    tokenizer = load_tokenizer(settings.tokenizer)
    examples = examples_from(files[1], tokenizer)
    before, held_out = _untrained(config, tokenizer, console)

    watch = Watch(settings, console, examples, fixed=config.training.steps != OPEN)
    console.rule("training")
    with watch:
        summary = Trainer(config=config, callbacks=[watch]).train()
    if summary.interrupted is not None:
        console.print(f"Stopped at step {summary.step} of {summary.steps}, and saved. To go on:", style="bold")
        console.print(f"  unmask demo --out {settings.out}")
        return summary.interrupted
    console.print(f"{summary.steps} steps done; the model is in {summary.checkpoint}")
    if not show_infilling(settings.out, examples, console):
        return None
    if summary.validation is not None:
        _compare(before, summary.validation, text_bytes(held_out, tokenizer), console)
    _go_on(settings, console)
    return None


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
        size = sum(path.stat().st_size for path in train) / 1e6
        console.print(f"Training a tokeniser on {len(train)} files of the standard library ({size:.1f} MB) ...")
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in train)
        train_tokenizer(texts, VOCABULARY, settings.tokenizer)
    for files, target in ((train, settings.train), (held_out, settings.held_out)):
        if not target.exists():
            # A file that is not UTF-8 is left out.
            manifest = prepare(files, target, settings.tokenizer, skip_bad=True)
            console.print(f"{target}: {manifest.documents} files, {manifest.tokens:,} tokens")
    console.print(f"data ready in {time.monotonic() - began:.0f} s")
    return train, held_out


def _config(settings: Settings) -> Config:
    """The run's own config where there is one (its length is fixed there), else the demo's."""
    written = settings.out / "config.yaml"
    if written.exists() and saved_steps(settings.out):
        config = Config.load(written)
        # A run whose length followed from a slow pace may be shorter than the warm-up it began with.
        config.schedule.warmup = min(config.schedule.warmup, config.training.steps or OPEN)
        return config
    model = {
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return Config.parse(
        {
            "model": {"config": model},
            "data": {
                "train": str(settings.train),
                "validation": str(settings.held_out),
                "tokenizer": str(settings.tokenizer),
                "pack_tokens": 256 if settings.files else 512,
            },
            "objective": {"name": "block_diffusion", "block_size": 32},
            "optimizer": {"learning_rate": 2e-3},
            "schedule": {"warmup": min(20, settings.steps or OPEN)},
            "training": {
                "steps": settings.steps or OPEN,
                "batch_size": 1,  # in minutes, many small steps teach more than few large ones
                "seed": settings.seed,
            },
            "checkpoint": {"path": str(settings.out)},
            "evaluation": {"packs": 2 if settings.files else 32, "draws": 2},
            "log": {"console": "none"},
        },
        "demo",
    )


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


def _untrained(config: Config, tokenizer: Any, console: Console) -> tuple[Bound, list[Document]]:
    """The bound of the model as the trainer will start it, and the held-out documents it is taken on.

    A new run also gets the precision that is quicker here.
    """
    seed, evaluation = config.training.seed, config.evaluation
    loaded = load(config.model, tokenizer, seed=seed, vocab_size=len(tokenizer))
    packs = Packs(open_dataset(str(config.data.validation)), config.data.pack_tokens)
    chosen = Sampler(packs, min(evaluation.packs, len(packs)), seed).batch(0)
    objective = build(config.objective.name, config.objective.options())
    objective = objective.model_copy(update={"mask_token_id": loaded.mask_token_id})
    row_model = RowModel(loaded.model)
    if config.training.steps == OPEN:
        config.training.precision = quicker_precision(row_model, objective, chosen[0])
    size = sum(parameter.numel() for parameter in loaded.model.parameters()) / 1e6
    console.print(f"model: {size:.1f} million parameters, {config.training.precision}; objective: block diffusion")
    found = bound(row_model, objective, chosen, seed=seed, draws=evaluation.draws)
    console.print(f"untrained, on held-out files: {found.nats_per_token:.3f} nats per token")
    return found, [document for pack in chosen for document in pack]


# functions with a hole


@dataclass(frozen=True)
class Example:
    """A held-out function: token ids before, in and after a hole of whole lines, and where it is from."""

    name: str
    prefix: list[int]
    hole: list[int]
    suffix: list[int]


def examples_from(files: Sequence[Path], tokenizer: Any, count: int = 6) -> list[Example]:
    """Short top-level functions of `files`, one a file, with a hole of one or two lines."""
    found: list[Example] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and 5 <= (node.end_lineno or 0) - node.lineno <= 16:
                source = "".join(lines[node.lineno - 1 : node.end_lineno])
                example = _with_hole(f"{path.parent.name}/{path.name}: {node.name}", source, node, tokenizer)
                if example is not None:
                    found.append(example)
                    break
    return found[:count]


def _with_hole(name: str, source: str, node: ast.FunctionDef, tokenizer: Any) -> Example | None:
    """The hole is the first simple statement, not the first nor the last of the body, of a useful size."""
    coded = tokenizer(source, add_special_tokens=False, return_offsets_mapping=True)
    token, offsets = coded["input_ids"], coded["offset_mapping"]
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in node.body[1:-1]:
        first = starts[statement.lineno - node.lineno] + statement.col_offset
        last = starts[(statement.end_lineno or statement.lineno) - node.lineno] + (statement.end_col_offset or 0)
        inside = [i for i, (begin, end) in enumerate(offsets) if end > first and begin < last]
        if isinstance(statement, ast.Assign | ast.Return | ast.Expr | ast.If) and 5 <= len(inside) <= 28:
            begin, end = inside[0], inside[-1] + 1
            return Example(name, token[:begin], token[begin:end], token[end:])
    return None


def fill(model: Any, tokenizer: Any, decoding: Any, example: Example, report: Callable[[Canvas], None]) -> Any:
    return sample(
        model,
        tokenizer,
        example.prefix,
        suffix=example.suffix,
        decoding=decoding,
        length=len(example.hole),
        report=report,
    )


def show_infilling(out: Path, examples: Sequence[Example], console: Console, count: int = 3) -> bool:
    """Open the run's folder as a user would, and fill a few holes before one's eyes; False after Ctrl-C."""
    opened = open_run(out)
    for example in examples[:count]:
        console.rule(example.name)
        with Live(console=console, auto_refresh=False, transient=True) as view:

            def draw(canvas: Canvas, view: Live = view) -> None:
                view.update(_whole(example, canvas, opened.tokenizer), refresh=True)  # noqa: B023
                if console.is_terminal:
                    time.sleep(0.05)

            result = fill(opened.model, opened.tokenizer, opened.objective.decoding, example, draw)
        console.print(_whole(example, result.canvas, opened.tokenizer))
        same = sum(ours == theirs for ours, theirs in zip(result.token, example.hole, strict=False))
        original = opened.tokenizer.decode(example.hole).strip()
        console.print(Text(f"the original: {original}", style="italic"))
        console.print(f"{same} of {len(example.hole)} tokens as there; {result.passes} forward passes\n")
        if result.interrupted:
            return False
    return True


def _whole(example: Example, canvas: Canvas, tokenizer: Any) -> Text:
    """The function, with what the sampler left out at its front."""
    front = Text(tokenizer.decode(example.prefix[: canvas.dropped]), style="dim")
    return front + picture(canvas, tokenizer)


# the live view


@dataclass
class Watch:
    """The trainer's callback: fixes the length of the run from its measured pace, and shows it live.

    In a terminal: progress, ETA, loss, and a held-out function being unmasked; elsewhere a line now and then.
    """

    settings: Settings
    console: Console
    examples: Sequence[Example]
    #: The length of the run is known: from the pace, or because it goes on, or is a trial.
    fixed: bool
    smooth: float | None = None
    shown: int = 0
    drawing: RenderableType = field(default_factory=Text)

    def __enter__(self) -> Watch:
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[status]}")
        self._progress = Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=self.console)
        self._task = self._progress.add_task("measuring the pace", total=None, status="")
        self._live = Live(self._progress, console=self.console, refresh_per_second=8, transient=True)
        if self.console.is_terminal:
            self._live.start()
        self._began = self._next = time.monotonic()
        self._paced: tuple[int, float] | None = None
        self._timed = not self.fixed
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        now, step = time.monotonic(), record["step"]
        self._pace(trainer, step, now)
        loss = record.get("nll", record["loss"])
        self.smooth = loss if self.smooth is None else 0.95 * self.smooth + 0.05 * loss
        status = f"masked-token loss {self.smooth:.2f}  {record.get('tokens_per_second', 0):,.0f} tokens/s"
        if self.fixed:
            self._progress.update(
                self._task, description="training", completed=step, total=trainer.steps, status=status
            )
        if now >= self._next and self.fixed:
            self._next = now + max(4.0, 1.2 * self.settings.minutes)
            if self.console.is_terminal:
                self._unmask(trainer)
            else:
                left = (now - self._began) / max(1, step) * (trainer.steps - step)
                self.console.print(f"step {step}/{trainer.steps}  {status}  ETA {left:.0f} s")

    def _pace(self, trainer: Trainer, step: int, now: float) -> None:
        """Give the run as many steps as fit into the time asked for; what the live view costs is set aside.

        The length is then kept, for the schedule's sake, unless the machine becomes so slow that it would take a
        quarter longer.
        """
        if not self._timed:
            return
        if self._paced is None:
            self._paced = (step, now) if step >= WARM else None
            return
        elapsed, budget = now - self._began, 60 * self.settings.minutes
        each = (now - self._paced[1]) / (step - self._paced[0])
        if self.fixed:
            if elapsed + each * (trainer.steps - step) > 1.25 * budget:
                trainer.set_steps(step + max(1, int((budget - elapsed) / each)))
        elif elapsed > 0.25 * budget or step >= MEASURED:
            trainer.set_steps(step + max(1, int(0.92 * (budget - elapsed) / each)))
            self.fixed = True

    def _unmask(self, trainer: Trainer) -> None:
        """Fill a hole with the model as it is, drawing every step."""
        if not self.examples:
            return
        example = self.examples[self.shown % len(self.examples)]
        self.shown += 1
        run = trainer.run

        def draw(canvas: Canvas) -> None:
            body = _whole(example, canvas, run.tokenizer)
            title = f"step {trainer.step}, held out: {example.name}"
            self.drawing = Panel(body, title=title, title_align="left", border_style="dim")
            self._live.update(Group(self._progress, self.drawing), refresh=True)

        fill(run.model, run.tokenizer, run.objective.decoding, example, draw)


# the end


def _compare(before: Bound, after: Bound, count: int, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"Likelihood bound on held-out files ({after.tokens:,} tokens)", title_justify="left")
    for column in ("", "nats per token", "bits per byte"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in (("before training", before), ("after training", after)):
        error = "" if math.isnan(found.standard_error) else f" +- {found.standard_error:.3f}"
        nats = f"{found.nats_per_token:.3f}{error}"
        table.add_row(name, nats, f"{found.bits_per_byte(count):.3f}")
    console.print(table)


def _go_on(settings: Settings, console: Console) -> None:
    out = settings.out
    console.print("Go on with:", style="bold")
    for command in (
        f'unmask sample {out} length=64 temperature=0.7 --prompt "def main():"',
        f'unmask sample {out} length=12 --prompt "for i in " --suffix "    total += i"',
        f"unmask eval {out} --data {settings.held_out}",
        f"unmask export {out} {out}-hf",
        f"unmask train {out / 'config.yaml'} training.steps=5000",
    ):
        console.print(f"  {command}", markup=False, soft_wrap=True)
