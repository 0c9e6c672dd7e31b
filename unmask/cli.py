"""The command line: a table of verbs, each a few lines that call the package.

What a user did wrong is one line on stderr and exit code 2; a run ended by a signal exits with 128 + its number.
Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import inspect as introspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_type_hints

import typer

from unmask.errors import UserError

#: Seconds that a process stays whose mistake another one tells.
LINGER = 5.0
#: What --ema is for.
EMA = "Take the averaged weights that training.ema kept."

app = typer.Typer(
    name="unmask",
    help="Train diffusion language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the `unmask` command."""
    # Threads that sleep between parallel regions, not spin: 2 % slower alone, ten times faster on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch remarks, once per rank, that all parameters have been used.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        for argument in sys.argv[1:]:
            if not argument.isprintable() and any("\udc80" <= character <= "\udcff" for character in argument):
                raise UserError(f"the argument {argument!r} is not UTF-8 text")
        with _sigterm_unwinds():
            app()
    except UserError as error:
        # Before the processes have met, those of one machine see the same mistake.
        told = int(os.environ.get("LOCAL_RANK", "0")) > 0 if error.told is None else error.told
        if told:  # a launcher ends all processes with the first that ends: let the one that speaks speak
            time.sleep(LINGER)
        else:
            print(f"unmask: {error}" if _rank() == 0 else f"unmask (rank {_rank()}): {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a disk that is full or read-only, a file without permission
        where = f"{error.filename}: " if error.filename else ""
        print(f"unmask: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _rank() -> int:
    """The number of this process among those that a launcher started together."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, through every `finally`: no half-written output stays behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # one is enough: a second must not interrupt the clearing up
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # elsewhere Python catches no signals
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of the dataclasses that `verb` takes as options of their own."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    flat: dict[str, introspect.Parameter] = {}
    for name, parameter in introspect.signature(verb).parameters.items():
        if name not in groups:
            flat[name] = parameter.replace(annotation=hints[name])
            continue
        own = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            annotation = own[field.name]
            flat[field.name] = parameter.replace(name=field.name, default=field.default, annotation=annotation)

    @wraps(verb)
    def flattened(**values: Any) -> None:
        made = {name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
                for name, kind in groups.items()}  # fmt: skip
        verb(**values, **made)

    by_keyword = [parameter.replace(kind=introspect.Parameter.KEYWORD_ONLY) for parameter in flat.values()]
    flattened.__signature__ = introspect.Signature(by_keyword)  # type: ignore[attr-defined]
    flattened.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return flattened


def _weights(checkpoint: Path, ema: bool) -> Path:
    """The path of a checkpoint's own weights, or of the averaged ones."""
    return checkpoint / "ema" if ema else checkpoint


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"unmask {version('unmask')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train diffusion language models."""


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(help="YAML file of the run.", metavar="CONFIG")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to it, such as training.steps=100.", metavar="key.path=value")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Do a run again, from what its folder records.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --from: folder of the new run, else RUN-again.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model, or go on with a run that was interrupted."""
    from unmask.training.record import given

    settings, repeat = given(config, overrides or [], source, out)
    if dry_run:
        from unmask.training.plan import plan, table

        facts = plan(settings)
        print(json.dumps(facts, indent=1) if as_json else table(facts))
        return
    from unmask.training.trainer import Trainer

    summary = Trainer(config=settings, repeat=repeat).train()
    words = ["unmask train", config, *(overrides or []), source and f"--from {source}", out and f"--out {out}"]
    again = " ".join(str(word) for word in words if word)
    if _rank() == 0:
        print(json.dumps(summary.facts()) if as_json else summary.sentence(again))
    if summary.interrupted is not None:
        raise typer.Exit(128 + summary.interrupted)


@app.command()
def inspect(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to it, such as parallel.block_parallel_size=4.", metavar="key.path=value"),
    ] = None,
    placement: Annotated[
        bool, typer.Option("--placement", help="Which rank owns which rows of the first pack.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers, for every pack of the first step.")] = False,
) -> None:
    """Draw what a run would do on several ranks; one process is enough."""
    from unmask.config import Config
    from unmask.training.plan import inspect as look

    if not placement:
        raise UserError("say what to inspect: --placement")
    drawing, found = look(Config.load(config, overrides))
    print(json.dumps(found) if as_json else drawing)


@app.command()
def prepare(
    source: Annotated[str, typer.Argument(help='A text folder, a text file, JSONL, or a pattern: "notes/**/*.tex".')],
    output: Annotated[Path, typer.Argument(help="Folder of the dataset to write.")],
    tokenizer: Annotated[str | None, typer.Option(help="Folder or file of the tokeniser.")] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(metavar="SIZE", help="Train a byte-level BPE of SIZE tokens on the source instead.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the dataset that is there.")] = False,
    eos: Annotated[bool, typer.Option(help="Close each document with the tokeniser's end token.")] = True,
) -> None:
    """Tokenise text into a dataset that training reads."""
    from unmask.data import prepare as prepare_dataset
    from unmask.data import source_tokenizer
    from unmask.tracking.reading import reading

    if tokenizer is not None and train_tokenizer is not None:
        raise UserError("give --tokenizer (one that exists) or --train-tokenizer (a size), not both")
    chosen = source_tokenizer(source, train_tokenizer) if train_tokenizer is not None else tokenizer
    with reading() as report:
        manifest = prepare_dataset(source, output, chosen, eos=eos, skip_bad=skip_bad, force=force, report=report)
    for example in manifest.examples:
        print(f"unmask: skipped {example}", file=sys.stderr)
    skipped = f", skipped {manifest.skipped:,} bad" if manifest.skipped else ""
    documents = "1 document" if manifest.documents == 1 else f"{manifest.documents:,} documents"
    print(f"{output}: {documents}, {manifest.tokens:,} tokens{skipped}")


@dataclass
class Texts:
    """What `sample` starts from."""

    prompt: Annotated[str, typer.Option(help="Text to continue.")] = ""
    suffix: Annotated[str | None, typer.Option(help="Text after the hole: fill `length` tokens before it.")] = None
    prompt_ids: Annotated[str | None, typer.Option(metavar='"1 2 3"', help="A prompt of token ids.")] = None
    suffix_ids: Annotated[str | None, typer.Option(metavar='"1 2 3"', help="A suffix of token ids.")] = None


@app.command()
@grouped
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its steps, or an exported folder.")],
    texts: Texts,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Such as length=64 temperature=0.8 top_p=0.95 threshold=0.9 steps=8 seed=1 block_size=32 method=full.",
            metavar="option=value",
        ),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Continue a prompt, or fill a hole; live in a terminal, the text (or its token ids) on stdout."""
    from unmask.sampling.command import ends, run

    first, last = ends((texts.prompt, texts.prompt_ids), (texts.suffix, texts.suffix_ids))
    if run(_weights(checkpoint, ema), options or [], first, last, as_json).interrupted:
        raise typer.Exit(130)


@dataclass
class Packs:
    """How much of its data `eval` takes."""

    packs: Annotated[int, typer.Option(min=0, help="Packs to evaluate; 0 takes all.")] = 0
    pack_tokens: Annotated[int, typer.Option(min=2, help="Tokens in a pack; longer documents are cut.")] = 4096


@app.command("eval")
@grouped
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its steps, or an exported folder.")],
    data: Annotated[str, typer.Option(help="A prepared dataset, text or JSONL.")],
    size: Packs,
    draws: Annotated[int, typer.Option(min=1, help="Noise draws per chunk.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the noise and of the choice of packs.")] = 0,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """The likelihood bound of a text, in nats per token, with its standard error."""
    from unmask.evaluation import evaluate as run
    from unmask.tracking.reading import steps

    with steps("evaluating", "packs") as report:
        choice = {"draws": draws, "packs": size.packs, "pack_tokens": size.pack_tokens, "seed": seed}
        found = run(_weights(checkpoint, ema), data, **choice, report=report)
    print(json.dumps(found.asdict()) if as_json else found.sentence())


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, or one of its steps.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[str, typer.Option(help="hf: a transformers folder.")] = "hf",
    dtype: Annotated[str | None, typer.Option(help="Of the weights, such as bfloat16; as trained by default.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write a trained model in a format that other programs open."""
    from unmask.export import export as run

    print(run(_weights(checkpoint, ema), output, format=format, dtype=dtype, force=force))


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(min=0.05, help="Time for the training itself.")] = 6.0,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("unmask-demo"),
    seed: Annotated[int, typer.Option(help="Of the weights, the noise and the order of the data.")] = 0,
    steps: Annotated[int | None, typer.Option(hidden=True)] = None,
    layers: Annotated[int, typer.Option(hidden=True)] = 2,
    files: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Train a small model on this Python's own source code, and watch it fill holes in functions."""
    from unmask.demo import Settings, run

    interrupted = run(Settings(minutes=minutes, out=out, seed=seed, steps=steps, layers=layers, files=files))
    if interrupted is not None:
        raise typer.Exit(128 + interrupted)


if __name__ == "__main__":
    main()
