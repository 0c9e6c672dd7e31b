"""`unmask sample`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli import complete
from unmask.cli.app import Checkpoint, Ema, weights
from unmask.errors import UserError


@dataclass
class Texts:
    """What `sample` starts from."""

    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; may be repeated.")] = None
    prompts: Annotated[Path | None, typer.Option(help="File of prompts: one per line, or JSONL.")] = None
    fill: Annotated[
        list[str] | None, typer.Option(metavar='"a [MASK:20] b"', help="Text with holes of so many tokens to fill.")
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
    stream: Annotated[bool, typer.Option("--stream", help="Print each block as it is finished.")] = False


def sample(
    checkpoint: Checkpoint,
    texts: Texts,
    chat: Chat,
    manner: Manner,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options, such as length=64 temperature=0.8 top_p=0.95 strategy=entropy steps=8 num_samples=4 seed=1.",
            metavar="option=value",
            autocompletion=complete.options,
        ),
    ] = None,
    ema: Ema = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each sample.")] = False,
) -> None:
    """Continue prompts, fill holes, or chat. Prints text (or token ids) to stdout, with a live view in a terminal."""
    source = weights(checkpoint, ema)
    given = {name: value for name, value in vars(texts).items() if value is not None}
    options = [*(options or []), *([f"preset={manner.as_}"] if manner.as_ else [])]
    if chat.chat:
        from unmask.cli.chat import talk

        if given:
            raise UserError(f"--chat answers what you type: leave --{next(iter(given)).replace('_', '-')} out")
        talk(source, options, system=chat.system, template=chat.chat_template, stream=manner.stream, as_json=as_json)
        return
    if chat != Chat():
        raise UserError("--system and --chat-template are for --chat")
    from unmask.cli.samples import run
    from unmask.sampling.prompts import asked

    if run(source, options, asked(**given), stream=manner.stream, as_json=as_json):
        raise typer.Exit(130)
