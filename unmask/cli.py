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
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from unmask import completion as complete
from unmask.errors import UserError, disk_refusal
from unmask.parallel import launched

if TYPE_CHECKING:
    from unmask.config import Config

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
    complete.answer_shells()
    launched.adopt_slurm(os.environ)
    try:
        for argument in sys.argv[1:]:
            if not argument.isprintable() and any("\udc80" <= character <= "\udcff" for character in argument):
                raise UserError(f"the argument {argument!r} is not UTF-8 text")
        with _sigterm_unwinds():
            app()
    except UserError as error:
        _tell(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # a disk that is full or read-only, a file without permission
        refusal = disk_refusal(error)
        if refusal is None:
            raise
        file = getattr(error, "filename", None)
        _tell(UserError(f"{file}: {refusal}" if file else refusal, told=False))
        sys.exit(2)


def _tell(error: UserError) -> None:
    """Print what went wrong, unless another process or the launcher does."""
    if launched.by_unmask():
        launched.record(error)
        return
    # Before the processes have met, those of one machine see the same mistake.
    told = int(os.environ.get("LOCAL_RANK", "0")) > 0 if error.told is None else error.told
    if told:  # a launcher ends all processes with the first that ends: let the one that speaks speak
        time.sleep(LINGER)
    else:
        rank = launched.rank()
        print(f"unmask: {error}" if rank == 0 else f"unmask (rank {rank}): {error}", file=sys.stderr)


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


@dataclass
class Launch:
    """How many processes `train` starts."""

    nproc: Annotated[
        str | None,
        typer.Option(metavar="N", help="Processes to start on this machine; auto: one a GPU, else as `parallel` asks."),
    ] = None
    restarts: Annotated[
        int, typer.Option(min=0, help="With --nproc: how often to start again, from the last checkpoint, by itself.")
    ] = 0
    restarted: Annotated[str | None, typer.Option(hidden=True)] = None


@app.command()
@grouped
def train(
    launch: Launch,
    config: Annotated[str | None, typer.Argument(help="YAML file of the run.", metavar="CONFIG")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, such as training.steps=100.",
            metavar="key.path=value",
            autocompletion=complete.overrides,
        ),
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
    if launch.nproc is not None or launch.restarts:
        size = _processes(settings, launch)
        if not dry_run and (size > 1 or launch.restarts):
            _launch(size, launch.restarts, [config, *(overrides or [])], {"from": source, "out": out}, as_json)
    if dry_run:
        from unmask.training.plan import plan, table

        facts = plan(settings)
        print(json.dumps(facts, indent=1) if as_json else table(facts))
        return
    from unmask.training.trainer import Trainer

    if launched.by_unmask():
        launched.end_with_launcher()
    trainer = Trainer(config=settings, repeat=repeat)
    trainer.restarted = launch.restarted
    summary = trainer.train()
    words = ["unmask train", config, *(overrides or []), source and f"--from {source}", out and f"--out {out}"]
    again = " ".join(str(word) for word in [*words, *launched.options()] if word)
    if launched.rank() == 0:
        print(json.dumps(summary.facts()) if as_json else summary.sentence(again))
    if summary.interrupted is not None:
        raise typer.Exit(128 + summary.interrupted)


def _processes(settings: Config, launch: Launch) -> int:
    """How many processes to start; UserError for what cannot be started here."""
    from unmask.parallel.launch import check, size_of

    if launch.nproc is None:
        raise UserError("--restarts is for processes that are started here: give --nproc too")
    check(settings, launch.restarts)
    return size_of(launch.nproc, settings.parallel)


def _launch(size: int, restarts: int, words: list[str | None], options: dict[str, Path | None], as_json: bool) -> None:
    """Train as `size` processes, and end as they do."""
    from unmask.parallel.launch import launch

    arguments = ["train", *filter(None, words), *(["--json"] if as_json else [])]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)] if value is not None else []
    raise typer.Exit(launch(arguments, size, restarts))


@app.command()
def inspect(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to it, such as parallel.block_parallel_size=4.",
            metavar="key.path=value",
            autocompletion=complete.overrides,
        ),
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


@dataclass
class Read:
    """How `prepare` reads its source."""

    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="The source's name for text, messages, ...; may be repeated."),
    ] = None
    split: Annotated[str | None, typer.Option(help="Of a saved Hugging Face dataset: train, ...")] = None
    dtype: Annotated[str | None, typer.Option(help="Of the ids in a raw .bin file: uint16, int32, ...")] = None
    end_id: Annotated[int | None, typer.Option(help="The id that ends a document in an array of ids.")] = None
    supervise: Annotated[str, typer.Option(help="Learn from `all` turns of the assistant, or the `last`.")] = "all"
    chat_template: Annotated[str | None, typer.Option(help="File with a Jinja chat template.")] = None
    eos: Annotated[bool, typer.Option(help="Close each document with the tokeniser's end token.")] = True
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed records out and count them.")] = False
    workers: Annotated[int, typer.Option(min=0, help="Processes that tokenise; 0: threads of this one.")] = 0


@app.command()
@grouped
def prepare(
    source: Annotated[
        str, typer.Argument(help='Text, JSONL, Parquet, ids, a folder of these, or a pattern: "notes/**/*.tex".')
    ],
    output: Annotated[Path, typer.Argument(help="Folder of the dataset to write.")],
    read: Read,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or file of the tokeniser.")] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(metavar="SIZE", help="Train a byte-level BPE of SIZE tokens on the source instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the dataset that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dataset's figures as JSON.")] = False,
) -> None:
    """Tokenise text, conversations or ids into a dataset that training reads."""
    from unmask.data.command import run
    from unmask.tracking.reading import reading

    with reading() as report:
        made = run(source, output, (tokenizer, train_tokenizer), force, vars(read), report)
    print(json.dumps(made.facts()) if as_json else made.sentence())


@dataclass
class Texts:
    """What `sample` starts from."""

    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; may be repeated.")] = None
    prompts: Annotated[Path | None, typer.Option(help="File of prompts: a line each, or JSONL.")] = None
    fill: Annotated[
        list[str] | None, typer.Option(metavar='"a [MASK:20] b"', help="Text with holes to fill, of so many tokens.")
    ] = None
    suffix: Annotated[str | None, typer.Option(help="Text after the hole: fill `length` tokens before it.")] = None
    prompt_ids: Annotated[list[str] | None, typer.Option(metavar='"1 2 3"', help="A prompt of token ids.")] = None
    suffix_ids: Annotated[str | None, typer.Option(metavar='"1 2 3"', help="A suffix of token ids.")] = None


@dataclass
class Chat:
    """How `sample` talks."""

    chat: Annotated[bool, typer.Option("--chat", help="Answer what is typed, or read from stdin, line by line.")] = (
        False
    )
    system: Annotated[str | None, typer.Option(help="System prompt of the chat.")] = None
    chat_template: Annotated[Path | None, typer.Option(help="File with a Jinja chat template.")] = None


@dataclass
class Manner:
    """How `sample` decodes and prints."""

    as_: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Decode as published: llada, dream, sdar, ...; or none.")
    ] = None
    stream: Annotated[bool, typer.Option("--stream", help="Print finished blocks at once, to a pipe too.")] = False


@app.command()
@grouped
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its steps, or an exported folder.")],
    texts: Texts,
    chat: Chat,
    manner: Manner,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Such as length=64 temperature=0.8 top_p=0.95 strategy=entropy steps=8 num_samples=4 seed=1.",
            metavar="option=value",
            autocompletion=complete.options,
        ),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each sample.")] = False,
) -> None:
    """Continue prompts, fill holes, or chat; live in a terminal, the text (or its token ids) on stdout."""
    weights = _weights(checkpoint, ema)
    given = {name: value for name, value in vars(texts).items() if value is not None}
    options = [*(options or []), *([f"preset={manner.as_}"] if manner.as_ else [])]
    if chat.chat:
        from unmask.sampling.chat import talk

        if given:
            raise UserError(f"--chat answers what it is told: leave --{next(iter(given)).replace('_', '-')} out")
        talk(weights, options, system=chat.system, template=chat.chat_template, stream=manner.stream, as_json=as_json)
        return
    if chat != Chat():
        raise UserError("--system and --chat-template are for --chat")
    from unmask.sampling.command import run
    from unmask.sampling.prompts import asked
    from unmask.tracking.reading import steps

    wanted, progress = asked(**given), partial(steps, "sampling", "texts")
    if run(weights, options, wanted, stream=manner.stream, as_json=as_json, progress=progress):
        raise typer.Exit(130)


@dataclass
class Evaluate:
    """What `eval` does, one of these."""

    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="A prepared dataset, text or JSONL; may be repeated."),
    ] = None
    generate: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts and answers, JSONL.")] = None
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...", help="Tasks of lm-eval.")] = None


@dataclass
class Measure:
    """How much `eval` measures of what."""

    packs: Annotated[int | None, typer.Option(min=0, help="Packs to evaluate of each set; 0 takes all.")] = None
    pack_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a pack (4096); longer documents are cut.")
    ] = None
    draws: Annotated[
        int | None, typer.Option(min=1, help="Noise draws per chunk (1), or per answer of tasks (32).")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of the noise, and of the choice of packs and examples.")] = None
    levels: Annotated[int | None, typer.Option(min=0, help="Also by noise level, in so many bins.")] = None
    ar: Annotated[bool, typer.Option("--ar", help="Also the next-token likelihood, under causal attention.")] = False
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question of a task.")] = None
    include_path: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Task files of your own.")] = None
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Ask tasks as in a chat.")] = False


@app.command("eval")
@grouped
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its steps, or an exported folder.")],
    what: Evaluate,
    measure: Measure,
    options: Annotated[
        list[str] | None,
        typer.Argument(help="Of the sampler: length=64 ...", metavar="option=value", autocompletion=complete.options),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """The likelihood bound of texts (torchrun divides the packs), answers to held-out prompts, or tasks of lm-eval."""
    from unmask.evaluation.command import run
    from unmask.tracking.reading import steps

    kinds = {f"--{name}": value for name, value in vars(what).items()}
    progress = steps if launched.rank() == 0 else None
    told = run(_weights(checkpoint, ema), kinds, vars(measure), options or [], progress=progress, as_json=as_json)
    if launched.rank() == 0:
        print(told)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, or one of its steps.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="hf: a transformers folder (adapters merged); family: the layout the model came in; peft: adapters."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights, such as bfloat16; as trained by default.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help=EMA)] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the folder, its files and their sizes.")] = False,
) -> None:
    """Write a trained model in a format that other programs open."""
    from unmask.export import export as run
    from unmask.export import facts

    folder = run(_weights(checkpoint, ema), output, format=format, dtype=dtype, force=force)
    print(json.dumps(facts(folder)) if as_json else folder)


@dataclass
class Convert:
    """How `convert` makes a diffusion model."""

    objective: Annotated[str, typer.Option(help="fast_dllm_v2, block_diffusion, i_dlm or nemotron.")] = "fast_dllm_v2"
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 32
    mask_token: Annotated[str | None, typer.Option(help="A token, known or new, or an id; else chosen.")] = None
    anneal: Annotated[str | None, typer.Option(help="causal: the attention in blocks; block-size: the blocks.")] = None


@app.command()
@grouped
def convert(
    model: Annotated[Path, typer.Argument(help="A transformers folder, or a .gguf file.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    how: Convert,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Make a diffusion model of an autoregressive one: mask token, config, and the run that trains it."""
    from unmask.convert import convert as run

    made = run(model, output, **vars(how), force=force)
    print(json.dumps(made.facts()) if as_json else made.sentence())


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their YAML files.", metavar="RUN")],
    by: Annotated[str, typer.Option(help="Where to compare losses: at equal `step` or equal `tokens`.")] = "step",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Runs side by side: where their configs differ, losses at the same point, speed and memory."""
    from unmask.tracking import compare as comparison

    facts = comparison.compare(runs, by)
    print(comparison.as_json(facts) if as_json else comparison.table(facts))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs would be written; its disk is measured.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """What this machine can do, what is missing, and whether a training step works on it (exit code 1 if not)."""
    from unmask.doctor import examine, table

    facts = examine(folder)
    print(json.dumps(facts, indent=1) if as_json else table(facts))
    if facts["problems"]:
        raise typer.Exit(1)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="The one to print.", autocompletion=complete.recipes)] = None,
    write: Annotated[Path | None, typer.Option(help="Write it to this file instead.", metavar="FILE")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print {name: what it is for}.")] = False,
) -> None:
    """Configs of the commonest jobs: list them, or make one yours with `unmask recipes NAME > run.yaml`."""
    from unmask import recipes as shipped

    if name is None and write is not None:
        raise UserError(f"name the recipe to write to {write}: unmask recipes lists them")
    if name is None:
        listed = {each: shipped.summary(each) for each in shipped.names()}
        print(json.dumps(listed, indent=1) if as_json else shipped.table())
    elif write is not None:
        shipped.write(name, write, force=force)
        print(write)
    else:
        print(shipped.text(name), end="")


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print the completion script of a shell: `source <(unmask completion bash)`."""
    print(complete.script(shell))


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
