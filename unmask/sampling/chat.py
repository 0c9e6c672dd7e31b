"""A conversation with a model that was trained on a chat template: what `unmask sample --chat` does.

The template (Jinja, as transformers reads it) turns the messages so far into a prompt. An answer ends with EOS, with
the model's own end tokens (generation_config.json), or with the special token that the template puts after an answer.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unmask.data.chat import rendered
from unmask.data.encoding import Encoder
from unmask.data.ends import special_tokens
from unmask.errors import UserError
from unmask.models.positions import limit_of
from unmask.registry import nearest
from unmask.sampling.api import Sample, pieces, result
from unmask.sampling.command import opened
from unmask.sampling.display import live
from unmask.sampling.session import Session
from unmask.terminal import say

COMMANDS = {"/exit": "leave (so does Ctrl-D)", "/reset": "forget what was said", "/help": "list the commands"}
#: Stands for an answer where the template is asked what it puts after one.
ANSWER = "unmask-answer"


class Conversation:
    """The messages so far. UserError for a tokeniser without a chat template, or one that cannot render these."""

    def __init__(self, tokenizer: Any, system: str | None = None):
        self.tokenizer = tokenizer
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []
        self._render([*self.opening, {"role": "user", "content": "?"}], True)

    def reset(self) -> None:
        self.messages = []

    def ask(self, text: str, room: int | None = None) -> tuple[list[int], int]:
        """The prompt, in token ids, after `text` was said, and how many messages were left out.

        The oldest question and its answer are left out, again and again, while the prompt has more than `room` tokens.
        """
        kept, left_out = [*self.messages, {"role": "user", "content": text}], 0
        while True:
            prompt = encoded(self.tokenizer, self._render([*self.opening, *kept], True))
            if room is None or len(prompt) <= room or len(kept) == 1:
                return prompt, left_out
            kept, left_out = kept[2:], left_out + 2

    def answered(self, text: str, answer: str, left_out: int = 0) -> None:
        """Remember a question and its answer; `left_out`: as `ask` said."""
        said = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.messages = [*self.messages[left_out:], *said]

    def end_tokens(self) -> list[int]:
        """The special token that the template puts after an answer, if any."""
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, after = self._render([*self.opening, *answered], False).rpartition(ANSWER)
        token = encoded(self.tokenizer, after) if found and after else []
        return token[:1] if token and token[0] in special_tokens(self.tokenizer) else []

    def _render(self, messages: list[dict[str, str]], asking: bool) -> str:
        where = "the chat template cannot be used"
        return rendered(self.tokenizer, messages, where, add_generation_prompt=asking)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return Encoder(tokenizer, eos=False).encode([text])[0].tolist() if text else []


def end_answers(session: Session, conversation: Conversation) -> None:
    """Let what ends an answer end it: see the module's docstring."""
    session.end_with(conversation.end_tokens())


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
    session = opened(checkpoint, overrides)
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
    end_answers(session, conversation)
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
    _finish(found, as_json)
    conversation.answered(text, found.text, left_out)


def _finish(found: Sample, as_json: bool) -> None:
    if as_json:
        facts = {"text": found.text, "tokens": found.token, "passes": found.passes, "interrupted": found.interrupted}
        print(json.dumps(facts), flush=True)
    else:
        print(flush=True)
