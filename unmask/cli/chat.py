"""`unmask sample --chat`: questions from stdin, and the answers to them, live in a terminal."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unmask.cli.samples import answer
from unmask.errors import UserError
from unmask.models.positions import limit_of
from unmask.registry import nearest
from unmask.sampling import opening
from unmask.sampling.api import pieces, result
from unmask.sampling.chat import Conversation
from unmask.sampling.display import live
from unmask.sampling.session import Session
from unmask.terminal import say

COMMANDS = {"/exit": "leave (so does Ctrl-D)", "/reset": "forget what was said", "/help": "list the commands"}


def talk(
    checkpoint: Path,
    overrides: list[str],
    *,
    system: str | None = None,
    template: Path | None = None,
    stream: bool = False,
    as_json: bool = False,
) -> None:
    """Read questions from stdin and print answers until it ends; Ctrl-C ends the answer that is being written.

    as_json: an object for each answer. template: a file with a chat template, in place of the tokeniser's own.
    """
    session = opening.session(checkpoint, overrides)
    if stream and as_json:
        raise UserError("--stream prints text as it is written; with --json leave it out")
    if session.options.num_samples > 1:
        raise UserError(f"--chat gives one answer: leave num_samples={session.options.num_samples} out")
    if session.tokenizer is None:
        raise UserError(f"{checkpoint}: has no tokeniser, and a chat is text; sample it with --prompt-ids")
    if template is not None:
        try:
            session.tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{template}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not session.tokenizer.chat_template:
        raise UserError(f"{checkpoint}: its tokeniser has no chat template; give one with --chat-template FILE")
    conversation = Conversation(session.tokenizer, system)
    session.end_with(conversation.end_tokens())
    typing = sys.stdin.isatty()
    if typing:
        say(f"{', '.join(COMMANDS)}; Ctrl-C ends an answer", file=sys.stderr)
        if find_spec("readline") is not None:
            import_module("readline")  # line editing and history for input()
    while True:
        try:
            text = input("> " if typing else "").strip()
        except EOFError:
            if typing:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not typing:
                raise
            print(file=sys.stderr)
            continue
        if text == "/exit":
            return
        if re.fullmatch(r"/\w+", text):
            _command(text, conversation)
        elif text:
            try:
                _answer(session, conversation, text, stream=stream, as_json=as_json)
            except UserError as error:  # a question that is too long; the next may not be
                say(f"unmask: {error}", file=sys.stderr)


def _command(text: str, conversation: Conversation) -> None:
    if text == "/reset":
        conversation.reset()
    elif text == "/help":
        say("\n".join(f"{name:<8} {meaning}" for name, meaning in COMMANDS.items()), file=sys.stderr)
    else:
        known = f"known: {', '.join(COMMANDS)}"
        say(f"unmask: unknown command {text}{nearest(text, list(COMMANDS))}; {known}", file=sys.stderr)


def _answer(session: Session, conversation: Conversation, text: str, *, stream: bool, as_json: bool) -> None:
    """Ask, show the answer, and remember both."""
    limit = limit_of(session.model.config)
    room = None if limit is None else limit.tokens - session.options.length
    prompt, left_out = conversation.ask(text, room)
    if left_out and limit is not None:
        full = f"unmask: the model's {limit.tokens:,} positions are full"
        say(f"{full}; the oldest messages are left out", file=sys.stderr)
    [work] = session.works([prompt], [None])
    try:
        if stream and not sys.stdout.isatty():
            for piece in pieces(session, work):
                say(piece.text, end="", flush=True)
        else:
            from rich.console import Console

            console = Console(stderr=True, highlight=False)
            watching = console.is_terminal and not as_json
            view: Any = live(session.tokenizer, console, given=False) if watching else nullcontext(None)
            with view as report:
                next(session.batches([work], report or (lambda canvas: None)))
            if not as_json:
                say(result(session, work).text, end="")
    except KeyboardInterrupt:
        work.interrupted = True
    found = result(session, work)
    print(json.dumps(answer(found)) if as_json else "", flush=True)
    conversation.answered(text, found.text, left_out)
