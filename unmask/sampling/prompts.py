"""What to sample from: prompts, suffixes and texts with holes, from the command line or a file of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.files import json_line, read_lines
from unmask.sampling.canvas import Fill
from unmask.sampling.session import Given, Prompt

JSONL = (".jsonl", ".ndjson", ".json")
#: What a record may say, and whether it is text.
FIELDS = {"prompt": True, "prompt_ids": False, "fill": True, "suffix": True, "suffix_ids": False}


@dataclass(frozen=True)
class Asked:
    """A prompt, and what comes after its hole, if it is one."""

    prompt: Prompt
    suffix: Given | None = None
    #: file:line, of a prompt from a file.
    where: str = field(default="", compare=False)

    @property
    def texts(self) -> bool:
        """Whether everything given is text."""
        given = self.prompt.parts if isinstance(self.prompt, Fill) else (self.prompt, self.suffix)
        return all(part is None or isinstance(part, str) for part in given)

    def around(self, holes: Sequence[Any]) -> list[Any]:
        """What was given and what its holes were filled with, in order."""
        if isinstance(self.prompt, Fill):
            first, *others = self.prompt.parts
            return [first, *(one for pair in zip(holes, others, strict=True) for one in pair)]
        return [self.prompt, *holes, *([] if self.suffix is None else [self.suffix])]


def asked(
    prompt: Sequence[str] = (),
    prompt_ids: Sequence[str] = (),
    fill: Sequence[str] = (),
    prompts: Path | None = None,
    suffix: str | None = None,
    suffix_ids: str | None = None,
) -> list[Asked]:
    """The command line's texts, token ids ("1 2 3") or file; nothing at all is one empty prompt."""
    ways = {"--prompt": prompt, "--prompt-ids": prompt_ids, "--fill": fill, "--prompts": [prompts] if prompts else []}
    given = [way for way, values in ways.items() if values]
    texts, ids = "--prompt" in given or suffix is not None, "--prompt-ids" in given or suffix_ids is not None
    if (texts and ids) or (suffix_ids is not None and given in (["--fill"], ["--prompts"])):
        raise UserError("give prompt and suffix as text (--prompt, --suffix) or as ids (--prompt-ids, --suffix-ids)")
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} each say what to sample from; give one of them")
    if prompts:
        return read(prompts, suffix)
    if fill:
        if suffix is not None:
            raise UserError("--fill says itself what comes after its holes; leave --suffix out")
        return [Asked(Fill.parse(text)) for text in fill]
    if ids:
        after = None if suffix_ids is None else _ids("--suffix-ids", suffix_ids)
        return [Asked(_ids("--prompt-ids", text), after) for text in prompt_ids or [""]]
    return [Asked(text, suffix) for text in prompt or [""]]


def _ids(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise UserError(f'{option} {text!r}: write token ids, whole numbers such as "1 2 3"') from None


def read(path: Path, suffix: str | None = None) -> list[Asked]:
    """The prompts of a file: of JSONL a record a line, of any other a line each; empty lines are left out.

    A record is {"prompt"[, "suffix"]}, {"prompt_ids"[, "suffix_ids"]} or {"fill"}; other fields are ignored. suffix:
    of the prompts that have none.
    """
    records = path.suffix.lower() in JSONL
    found = [
        _record(json_line(text, where), where, suffix) if records else Asked(text, suffix, where)
        for where, text in read_lines(path)
    ]
    if not found:
        raise UserError(f"{path}: holds no prompt; write one a line, or a JSON record a line")
    return found


def _record(record: Any, where: str, suffix: str | None) -> Asked:
    if not isinstance(record, dict):
        raise UserError(f'{where}: a record is an object, such as {{"prompt": "Once"}}, not {record!r}')
    given = {name: record[name] for name in FIELDS if record.get(name) is not None}
    for name, value in given.items():
        good = isinstance(value, str) if FIELDS[name] else _are_ids(value)
        if not good:
            raise UserError(f'{where}: "{name}" is {"text" if FIELDS[name] else "a list of token ids"}, not {value!r}')
    if len(given.keys() & {"prompt", "prompt_ids", "fill"}) != 1:
        raise UserError(f'{where}: a record has one of "prompt", "prompt_ids" and "fill"; it has {_names(record)}')
    if "fill" in given:
        if len(given) > 1:
            raise UserError(f'{where}: "fill" says itself what comes after its holes; leave the suffix out')
        try:
            return Asked(Fill.parse(given["fill"]), where=where)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    kind = "prompt" if "prompt" in given else "prompt_ids"
    after = given.get(kind.replace("prompt", "suffix"))
    if len(given) > 1 and after is None:
        raise UserError(f"{where}: give prompt and suffix both as text or both as ids")
    return Asked(given[kind], suffix if after is None and kind == "prompt" else after, where)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _names(record: dict[str, Any]) -> str:
    return ", ".join(sorted(record)) or "nothing"
