"""What a rule on settings is, what it may ask of, and the two commonest kinds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

from unmask.config import Config, ParallelConfig, Section


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


class Rule(NamedTuple):
    """keys: with a space between; condition: true, or values for the sentence besides settings, where the rule is
    broken. In the sentence {section.key} is a value, {section.key=} the key with it."""

    keys: str
    condition: Callable[..., Any]
    sentence: str

    def broken(self, facts: Mapping[str, Any]) -> str | None:
        """The sentence where the rule is broken; None where it is kept, or cannot be asked."""
        keys = [key for key in self.keys.split() if not key.startswith("objective.")]
        names = list(inspect.signature(self.condition).parameters)
        if not all(name in facts for name in (*names, *(key.partition(".")[0] for key in keys))):
            return None
        if not all(_given(facts, key) for key in keys):
            return None
        found = self.condition(*(facts[name] for name in names))
        if not found:
            return None
        values = found if isinstance(found, Mapping) else {}
        return _Sentence().format(re.sub(r"\{([\w.]+)=", r"\1={\1", self.sentence), **facts, **values)


class _Sentence(Formatter):
    """Values as a user writes them."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return format(value, spec or "g") if isinstance(value, float) else format(value, spec)


def _given(facts: Mapping[str, Any], key: str) -> bool:
    """Whether a setting differs from its default."""
    first, *path, last = key.split(".")
    section: Section = facts[first]
    for name in path:
        section = getattr(section, name)
    return last in section.given()


def always() -> bool:
    return True


def no_effect(section: str, keys: str, condition: Callable[..., Any], why: str) -> list[Rule]:
    """Keys of a section that nothing reads under the condition."""
    paths = [f"{section}.{key}" for key in keys.split()]
    return [Rule(path, condition, f"{path}={{{path}!s}} has no effect{why}") for path in paths]


def apart(ones: str, others: str, why: str, other: str = "") -> list[Rule]:
    """Each of `ones` beside each of `others` (the sentence says `other`) is refused."""
    return [
        Rule(f"{one} {key}", always, f"{{{one}=}} does not go with {other or f'{{{key}=}}'}{why.replace('ONE', one)}")
        for one, key in product(ones.split(), others.split())
    ]
