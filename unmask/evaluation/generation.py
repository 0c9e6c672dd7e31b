"""Evaluation by generation: what a model answers to held-out prompts, beside what it should have (`--generate`).

A line of the file is {"prompt": "..."} or {"messages": [...]}, whose last message, if it is the assistant's, is the
expected answer. "response" (a text, or several of which any will do) is what an answer should equal, but for the space
around it; "contains" what it should hold, else the response. Records with neither are answered and not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.data.chat import rendered, unwritten
from unmask.errors import UserError
from unmask.files import json_line, read_lines
from unmask.sampling import opening
from unmask.sampling.api import Sample, result
from unmask.sampling.chat import Conversation, encoded
from unmask.sampling.options import Options
from unmask.sampling.session import Session


@dataclass(frozen=True)
class Question:
    """where: file:line; prompt: a text, or messages; responses, contains: see the module's docstring."""

    where: str
    prompt: str | list[dict[str, Any]]
    tools: list[Any] | None = None
    responses: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()

    def equals(self, answer: str) -> bool | None:
        """Whether an answer is an expected one; None where none is."""
        return answer.strip() in {text.strip() for text in self.responses} if self.responses else None

    def holds(self, answer: str) -> bool | None:
        """Whether an answer holds what it should; None where nothing is asked of it."""
        wanted = self.contains or self.responses
        return any(text.strip() in answer for text in wanted) if wanted else None


def generate(
    checkpoint: str | Path,
    prompts: Path,
    options: Options,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Answers to a file of prompts, as plain values.

    {"records", "samples", "exact_match", "contains" (each {"value", "standard_error", "samples"}, or None where no
    record asks for it), "ended" (the share of answers that end before `length`), "tokens", "passes", "outputs"}. The
    standard error counts samples as if they were independent. UserError for a file that cannot be read, and for
    messages without a chat template.
    """
    opening.refuse_several("eval --generate")
    questions = read(prompts)
    opened = opening.opened(checkpoint, options)
    if opened.tokenizer is None:
        raise UserError(f"{checkpoint}: has no tokeniser, and prompts are texts")
    session = Session(opened.model, opened.tokenizer, options, opened.objective.decoding)
    if any(not isinstance(one.prompt, str) for one in questions):
        if not opened.tokenizer.chat_template:
            raise UserError(f"{checkpoint}: its tokeniser has no chat template for messages; write prompts as text")
        session.end_with(Conversation(opened.tokenizer).end_tokens())
    rendered: list[Any] = [_rendered(one, opened.tokenizer) for one in questions]
    works = session.works(rendered, [None] * len(rendered), [one.where for one in questions])
    found: list[tuple[Question, Sample, bool]] = []
    for batch in session.batches(works):
        if any(work.interrupted for work in batch):
            raise KeyboardInterrupt
        for work in batch:
            ended = work.canvas.end < work.canvas.stop
            found.append((questions[work.prompt], result(session, work), ended))
        report(len(found), len(works))
    return _facts(found, len(questions))


def _rendered(question: Question, tokenizer: Any) -> str | list[int]:
    """The prompt, a text or, of messages, token ids, up to where the answer begins."""
    if isinstance(question.prompt, str):
        return question.prompt
    where = f"{question.where}: the chat template refuses it"
    text = rendered(tokenizer, question.prompt, where, tools=question.tools, add_generation_prompt=True)
    if left_out := unwritten(question.prompt, text):
        raise UserError(f"{question.where}: {left_out}")
    return encoded(tokenizer, text)


def _facts(found: Sequence[tuple[Question, Sample, bool]], records: int) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = [
        {
            "where": question.where,
            "prompt": question.prompt,
            "output": sample.text,
            "responses": list(question.responses),
            "exact_match": question.equals(sample.text),
            "contains": question.holds(sample.text),
            "ended": ended,
            "tokens": len(sample.token),
            "passes": sample.passes,
            "sample": sample.number,
        }
        for question, sample, ended in found
    ]
    return {
        "records": records,
        "samples": len(outputs),
        "exact_match": _rate([one["exact_match"] for one in outputs]),
        "contains": _rate([one["contains"] for one in outputs]),
        "ended": sum(ended for *_, ended in found) / len(found),
        "tokens": sum(len(sample.token) for _, sample, _ in found),
        "passes": sum(sample.passes for _, sample, _ in found),
        "outputs": outputs,
    }


def _rate(answers: Sequence[bool | None]) -> dict[str, Any] | None:
    """The share of true answers, with the standard error of a proportion; None where none was asked for."""
    given = [answer for answer in answers if answer is not None]
    if not given:
        return None
    rate = sum(given) / len(given)
    return {
        "value": rate,
        "standard_error": math.sqrt(rate * (1 - rate) / len(given)),
        "samples": len(given),
    }


def read(path: Path) -> list[Question]:
    """The records of a JSONL file; UserError, with the line, for one that is none."""
    found = [_question(json_line(text, where), where) for where, text in read_lines(path)]
    if not found:
        raise UserError(f'{path}: holds no record, such as {{"prompt": "2 + 2 =", "response": "4"}}')
    return found


def _question(record: Any, where: str) -> Question:
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise UserError(f'{where}: a record is an object with either "prompt" or "messages"')
    responses, contains = (_texts(record, name, where) for name in ("response", "contains"))
    if "prompt" in record:
        if not isinstance(record["prompt"], str):
            raise UserError(f'{where}: "prompt" is not text')
        return Question(where, record["prompt"], None, responses, contains)
    messages = _messages(record["messages"], where)
    if messages[-1]["role"] == "assistant":
        *messages, last = messages
        if responses:
            raise UserError(f'{where}: the last message and "response" both say the expected answer; leave one out')
        if not isinstance(last.get("content"), str):
            raise UserError(f"{where}: the expected answer, the last message, is not text")
        responses = (last["content"],)
    if not messages:
        raise UserError(f"{where}: nothing comes before the expected answer")
    return Question(where, messages, _tools(record.get("tools"), where), responses, contains)


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not good or not messages:
        raise UserError(f'{where}: "messages" is not a list of objects with "role" and "content"')
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _tools(tools: Any, where: str) -> list[Any] | None:
    """As data for training holds them: a list of JSON schemas, or that as a string of JSON."""
    from unmask.data.chat import tools_of
    from unmask.data.records import Bad

    try:
        return tools_of(tools, where)
    except Bad as error:
        raise UserError(str(error)) from None


def _texts(record: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = record.get(name)
    texts = [] if value is None else [value] if isinstance(value, str) else value
    given = isinstance(texts, list) and all(isinstance(text, str) and text.strip() for text in texts)
    if not given or value == []:
        raise UserError(f'{where}: "{name}" is neither text nor a list of texts')
    return tuple(texts)
