"""`unmask prepare`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.say import dataset, show
from unmask.errors import UserError
from unmask.terminal import say


@dataclass
class Read:
    """How `prepare` reads its source."""

    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="The source's field for text, messages, ...; may be repeated."),
    ] = None
    split: Annotated[str | None, typer.Option(help="Split of a saved Hugging Face dataset: train, ...")] = None
    dtype: Annotated[str | None, typer.Option(help="Type of the ids in a raw .bin file: uint16, int32, ...")] = None
    end_id: Annotated[int | None, typer.Option(help="The id that ends a document in an array of ids.")] = None
    supervise: Annotated[str, typer.Option(help="Supervise `all` assistant messages, or the `last`.")] = "all"
    chat_template: Annotated[str | None, typer.Option(help="File with a Jinja chat template.")] = None
    bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="Add the beginning token; default: as the tokeniser.")
    ] = None
    eos: Annotated[bool, typer.Option(help="End each document with the tokeniser's end token.")] = True
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed records out and count them.")] = False
    workers: Annotated[int, typer.Option(min=0, help="Processes that tokenise; 0: threads of this one.")] = 0


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
    force: Annotated[bool, typer.Option("--force", help="Replace an existing dataset.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dataset's figures as JSON.")] = False,
) -> None:
    """Tokenise text, conversations or ids into a dataset for training."""
    from unmask.cli.progress import reading
    from unmask.data.prepare import prepare as write
    from unmask.data.prepare import source_tokenizer

    if tokenizer is not None and train_tokenizer is not None:
        raise UserError("give --tokenizer (one that exists) or --train-tokenizer (a size), not both")
    options = {name: value for name, value in vars(read).items() if name != "field"}
    options |= {"fields": dict(map(_field, read.field or [])), "bos": "auto" if read.bos is None else read.bos}
    with reading() as report:
        chosen = tokenizer
        if train_tokenizer is not None:
            chosen = source_tokenizer(source, train_tokenizer, report=report, **options)
        start = time.perf_counter()
        manifest = write(source, output, chosen, force=force, report=report, **options)
        seconds = time.perf_counter() - start
    for example in manifest.examples:
        say(f"unmask: skipped {example}", file=sys.stderr)
    facts = {"path": str(output), **manifest.model_dump(mode="json", exclude={"files"}), "seconds": round(seconds, 3)}
    show(facts, dataset, as_json)


def _field(text: str) -> tuple[str, str]:
    name, _, column = text.partition("=")
    if not (name and column):
        raise UserError(f"--field {text!r} is not of the form NAME=COLUMN, such as text=content")
    return name, column
