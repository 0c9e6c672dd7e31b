"""Conversations as a chat template writes them, and which characters of them are learnt from.

A template with `{% generation %}` blocks says itself what the assistant wrote. For any other, turn i is what rendering
messages[: i + 1] adds to rendering messages[:i] with the generation prompt: exactly what the model is to write there.
That holds only where each is the beginning of the whole conversation, which is verified.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from unmask.data.reading import Reading
from unmask.data.records import Bad, Item, Piece, Record, Spans, pieces_of
from unmask.errors import UserError, as_path
from unmask.parsing import json_value

#: Roles that chat templates are written for.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
#: As transformers finds them.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Texts of templates that are tokens of their own.
SPECIAL = re.compile(r"<\|[^\s|<>{}]+\|>|</?[a-z]+(?:_[a-z]+)*>|\[/?[A-Z][A-Z_]+\]")


@dataclass(frozen=True)
class Chat:
    """A chat template, ready to be sent to another process.

    template, with_tools: what conversations without and with tools are rendered by; special: names and texts of the
    tokeniser's special tokens, as templates use them; supervise: every turn of the assistant, or the last.
    """

    template: str
    with_tools: str
    special: dict[str, Any]
    supervise: Literal["all", "last"]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"{self.template}\0{self.with_tools}".encode()).hexdigest()

    def render(self, messages: Any, tools: Any, where: str) -> tuple[str, Spans]:
        """The conversation as text, and where it is learnt from. Raises Bad."""
        tools, turns = _checked(messages, tools, where)
        if self.supervise == "last":
            turns = turns[-1:]
        try:
            marked = GENERATION.search(self._template(tools))
            found = self._marked(messages, tools, turns) if marked else self._by_prefixes(messages, tools, turns, where)
            if left_out := unwritten(messages, found[0]):
                raise Bad(where, left_out)
            return found
        except Bad:
            raise
        except Exception as error:  # whatever a template makes jinja raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise Bad(where, f"the chat template refuses it: {reason}{_advice(messages)}") from None

    def _marked(self, messages: list[Any], tools: Any, turns: list[int]) -> tuple[str, Spans]:
        text, stretches = self._render(messages, tools, marks=True)
        if self.supervise == "last":  # those of earlier turns come first
            earlier = messages[: turns[0]]
            stretches = stretches[len(self._render(earlier, tools, marks=True)[1]) if earlier else 0 :]
        return text, Spans([(start, stop) for start, stop in stretches if stop > start], exact=False)

    def _by_prefixes(self, messages: list[Any], tools: Any, turns: list[int], where: str) -> tuple[str, Spans]:
        asks = self._asks(tools, where)
        text = self._render(messages, tools)[0].removesuffix(asks)
        stretches = []
        for turn in turns:
            start, _ = self._render(messages[:turn], tools, prompt=True)
            stop = self._render(messages[: turn + 1], tools)[0].removesuffix(asks)
            if not (text.startswith(stop) and stop.startswith(start)):
                way = "or use --supervise last (supervise=...)"
                if self.supervise == "last":
                    way = f"or leave out what follows message {turn}, the last of the assistant"
                raise Bad(
                    where,
                    f"the chat template writes message {turn} in one way while it is the last and in another before "
                    "what follows: mark the assistant's part with {% generation %} in a template of your own "
                    f"(`unmask prepare --chat-template FILE`), {way}",
                )
            stretches.append((len(start), len(stop)))
        return text, Spans(stretches, exact=True)

    @cached_property
    def _known(self) -> dict[bool, str | None]:
        return {}

    def _asks(self, tools: Any, where: str) -> str:
        """What asks for an answer, where the template writes it at the end of every conversation, asked for or not.

        It is no part of the answer before it. Llama 3's first template is such a one. Raises Bad where it is not known.
        """
        given = tools is not None
        if given not in self._known:
            self._known[given] = self._found_asking(tools)
        if (asks := self._known[given]) is None:
            raise Bad(
                where,
                "the chat template asks for an answer at the end of every conversation, whatever add_generation_prompt "
                "says: put {% if add_generation_prompt %} and {% endif %} round that in a template of your own "
                "(`unmask prepare --chat-template FILE`)",
                setting=True,
            )
        return asks

    def _found_asking(self, tools: Any) -> str | None:
        """See `_asks`; "" for a template that writes it where it is told to, None where what it writes is not known."""
        said: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            asked, answered = self._render(said[:1], tools)[0], self._render(said, tools)[0]
            more = self._render([*said, said[0]], tools)[0]
            if asked != self._render(said[:1], tools, prompt=True)[0] or more.startswith(answered):
                return ""
        except Exception:  # a template for other conversations: what it does with these is told there
            return ""
        try:
            asks = self._render([], tools)[0].removeprefix(str(self.special.get("bos_token", "")))
        except Exception:  # it takes the first message for granted
            return None
        fits = asks and asked.endswith(asks) and more.startswith(answered.removesuffix(asks)) and answered != more
        return asks if fits and answered.endswith(asks) else None

    def _template(self, tools: Any) -> str:
        return self.template if tools is None else self.with_tools

    def _render(
        self, messages: list[Any], tools: Any, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text, and the [start, stop) of its generation blocks where marks are asked for."""
        from transformers.utils.chat_template_utils import render_jinja_template

        from unmask.data.templates import bounded

        template = self._template(tools)
        with bounded(template):
            texts, stretches = render_jinja_template(
                [[{key: value for key, value in message.items() if value is not None} for message in messages]],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.special,
            )
        return texts[0], stretches[0] if marks else []


def rendered(tokenizer: Any, messages: list[Any], where: str, **options: Any) -> str:
    """A conversation as the tokeniser's template writes it; options: of transformers' apply_chat_template.

    UserError, which begins with `where`, for whatever the template makes of it that is no text.
    """
    from unmask.data.templates import bounded

    try:
        template = tokenizer.chat_template
        with bounded(template if isinstance(template, str) else "\n".join((template or {}).values())):
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # whatever a template makes jinja raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}: {reason}{_advice(messages)}") from None


def chat_of(tokenizer: Any, supervise: Literal["all", "last"]) -> Chat | None:
    """The chat template of a transformers tokeniser; None where it has none."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several, none of which is the default
        raise UserError(f"the tokeniser's chat templates: {error}") from None
    return Chat(template, tokenizer.get_chat_template(tools=[]), dict(tokenizer.special_tokens_map), supervise)


class NoTemplate:
    """In place of a chat template where there is none: refuses a conversation that nothing else is wrong with."""

    def render(self, messages: Any, tools: Any, where: str) -> tuple[str, Spans]:
        _checked(messages, tools, where)
        raise Bad(
            where,
            "messages need a chat template, and the tokeniser has none: give one with "
            "`unmask prepare --chat-template FILE` (chat_template=...)",
            setting=True,
        )


class Contents:
    """Conversations as the contents of their messages, a line each."""

    def render(self, messages: Any, tools: Any, where: str) -> tuple[str, Spans]:
        _check_messages(messages, where)
        text = "\n".join(message["content"] for message in messages if isinstance(message.get("content"), str))
        return text, Spans([(0, len(text))], exact=False)


def texts_of(item: Item, reading: Reading) -> Iterator[str]:
    """The texts of an item, for training a tokeniser."""
    pieces = pieces_of(item, reading, Contents()) if isinstance(item, Record) else [item]
    yield from (piece.content for piece in pieces if isinstance(piece, Piece) and isinstance(piece.content, str))


def read_template(file: str) -> str:
    """The chat template in a text file. Raises UserError, also for one that jinja cannot read."""
    path = as_path(file, "a chat template")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no chat template can be read: {getattr(error, 'strerror', None) or error}") from None
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    from unmask.data.templates import bounded

    try:
        with bounded(text):
            render_jinja_template([], chat_template=text)  # of no conversation: it is compiled
    except TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: not a chat template: {error.message}") from None
    return text


def special_texts(template: str) -> tuple[str, ...]:
    """What a template writes round messages that is to be a token: <|im_start|>, <end_of_turn>, [INST], <think>."""
    return tuple(dict.fromkeys(SPECIAL.findall(template)))


def _checked(messages: Any, tools: Any, where: str) -> tuple[list[Any] | None, list[int]]:
    """(tools, which messages are the assistant's) of a conversation that can be learnt from. Raises Bad."""
    _check_messages(messages, where)
    tools = tools_of(tools, where)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise Bad(where, 'has no message of the role "assistant", so nothing to learn')
    return tools, turns


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise Bad(where, '"messages" is not a list of messages')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Bad(where, f'message {number} is not an object with "role" and "content"')
        content = message.get("content")
        if content is None and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        if not isinstance(content, str | list):
            raise Bad(where, f'message {number} ({message["role"]}) has no "content"')


def unwritten(messages: list[Any], text: str) -> str | None:
    """What is wrong where the template has left out a message of a role that templates do not know ("gpt", "sytem").

    Nor may it write the parts of a content as Python does. text: what it wrote. Of the roles that they know, one may
    leave something out on purpose: reasoning, say.
    """
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if isinstance(content, list) and content and str(content) in text:
            return f'the chat template takes "content" for a text, and message {number} has parts: write one text'
        if role not in ROLES and isinstance(content, str) and content.strip() not in text:
            known = ", ".join(ROLES)
            return f"the chat template leaves out message {number}, of the role {role!r}; usual roles are {known}"
    return None


def _advice(messages: list[Any]) -> str:
    """What to do about a conversation of a kind that many templates refuse."""
    if any(message.get("content", None) is None for message in messages):
        return '; put "content": "" beside "tool_calls"'
    if any(isinstance(message.get("content"), list) for message in messages):
        return '; "content" is given as parts: write it as one text'
    if messages[0]["role"] == "assistant":
        return "; it begins with the assistant, and many templates have no words for that: begin with the user"
    return ""


def tools_of(tools: Any, where: str) -> list[Any] | None:
    """Tools as a list of JSON schemas; some data sets hold them as a string of JSON."""
    if isinstance(tools, str):
        try:
            tools = json_value(tools) if tools.strip() else None
        except ValueError as error:
            raise Bad(where, f'"tools" is a string, and not one of JSON ({error})') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Bad(where, '"tools" is not a list of JSON schemas')
    return tools
