"""What a rule on settings is, what it may ask of, and the two commonest kinds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

from unmask.config import Config, ParallelConfig


@dataclass(frozen=True)
class Known:
    """What is known of a run; None: not yet.

    parallel: the config's, where nothing else is known of it; objective: the built one, bound to no model yet;
    decoder: the model's DecoderSpec; device: its type; validation: whether there are held-out data; prepared:
    whether all data are; steps: of the whole run; processes: that were started; restarts: that a launcher may make.
    """

    config: Config | None = None
    parallel: ParallelConfig | None = None
    objective: Any = None
    decoder: Any = None
    device: str | None = None
    validation: bool | None = None
    prepared: bool | None = None
    steps: int | None = None
    processes: int | None = None
    restarts: int | None = None

    def facts(self) -> dict[str, Any]:
        """What the parameters of conditions stand for, by name."""
        sections = {} if self.config is None else {name: getattr(self.config, name) for name in Config.model_fields}
        sections.pop("objective", None)
        return sections | {name: value for name, value in vars(self).items() if value is not None}


def always() -> bool:
    return True


class Rule(NamedTuple):
    """keys: of settings that must be given, that is, differ from their defaults, or, as `key=value|value`, have one of
    these values, and of what else is known and must be true, all for the rule to be broken; condition: what must hold
    besides, its parameters say what it asks of. Where it returns a mapping, these are values for the sentence, in
    which {section.key} is the value of a setting, and {section.key=} is with its key.
    """

    keys: str
    sentence: str
    condition: Callable[..., Any] = always

    def broken(self, facts: Mapping[str, Any]) -> str | None:
        """The sentence where the rule is broken; None where it is kept, or cannot be asked."""
        keys, names = self.keys.split(), list(inspect.signature(self.condition).parameters)
        if not all(re.split(r"[.=]", name)[0] in facts for name in (*names, *keys)):
            return None
        found = all(_holds(facts, key) for key in keys) and self.condition(*(facts[name] for name in names))
        if not found:
            return None
        values = found if isinstance(found, Mapping) else {}
        return _Sentence().format(re.sub(r"\{([\w.]+)=", r"\1={\1", self.sentence), **facts, **values)


def _holds(facts: Mapping[str, Any], text: str) -> bool:
    key, sign, wanted = text.partition("=")
    first, *path = key.split(".")
    value, section = facts[first], None
    for name in path:
        value, section = getattr(value, name, None), value
    if sign:
        return _shown(value) in wanted.split("|")
    return bool(value) if section is None else path[-1] in section.given()


def _shown(value: Any) -> str:
    """A value as a user writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return format(value, "g") if isinstance(value, float) else str(value)


class _Sentence(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        return format(value, spec) if spec else _shown(value)


def no_effect(section: str, keys: str, where: str, why: str) -> list[Rule]:
    """Keys of a section that nothing reads where others have a value."""
    paths = [f"{section}.{key}" for key in keys.split()]
    return [Rule(f"{path} {where}", f"{path}={{{path}!s}} has no effect{why}") for path in paths]


def apart(ones: str, others: str, why: str, other: str = "") -> list[Rule]:
    """Each of `ones` beside each of `others` (the sentence says `other`) is refused."""
    return [
        Rule(f"{one} {key}", f"{{{one}=}} does not go with {other or f'{{{key}=}}'}{why.replace('ONE', one)}")
        for one, key in product(ones.split(), others.split())
    ]
