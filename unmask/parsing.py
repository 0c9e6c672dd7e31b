"""Text that other people wrote, as values: YAML and JSON whose depth and size are bounded before they are built.

YAML is read by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), as people mean numbers: 010
is ten, 1e-4 a number, 1:30 and 2020-01-02 are text. Whatever else a reader raises becomes ValueError, in one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

#: Levels of lists and mappings in one another.
DEPTH = 100
#: Values in one text, those behind aliases counted wherever they stand.
VALUES = 200_000
#: Characters of a YAML text.
SIZE = 10_000_000

NULL = r"~|null|Null|NULL|"
BOOLEAN = r"true|True|TRUE|false|False|FALSE"
INTEGER = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
BASES = {"0o": 8, "0x": 16}


class NotYaml(ValueError):
    """What is wrong with a YAML text, and in which line of it, if that is known."""

    def __init__(self, what: str, line: int | None = None):
        super().__init__(what)
        self.line = line


def yaml_value(text: str) -> Any:
    """The value of a YAML text; NotYaml where there is none, or one that nobody would write by hand."""
    try:
        if len(text) > SIZE:
            raise NotYaml(f"longer than {SIZE:,} characters")
        _bound(yaml.parse(text, _Loader))
        return yaml.load(text, _Loader)
    except NotYaml:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise NotYaml(what, mark.line + 1 if mark else None) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # a value that its tag cannot have
        raise NotYaml(f"a value that cannot be read: {str(error).splitlines()[0]}") from None


def yaml_text(value: Any) -> str:
    """A value as YAML; `yaml_value` of it gives the value again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError, whose message is one line, for anything else."""
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ValueError("lists and objects in one another too many times") from None


def check_characters(text: str) -> None:
    """ValueError for half of a surrogate pair, which JSON can write and no tokeniser or terminal takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("holds half of a surrogate pair, which is no character")


class _Loader(yaml.SafeLoader):
    """The core schema; mappings name every key once, and by text or a number (PyYAML lets the last of several win)."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused("a list or a mapping is no key", key)
            if key.value in seen:
                raise _refused(f"{key.value!r} is there twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as something else, and writes no aliases."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _refused(what: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=what, problem_mark=node.start_mark)


def _integer(loader: yaml.SafeLoader, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, BASES.get(text[:2], 10))


def _float(loader: yaml.SafeLoader, node: Any) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _boolean(loader: yaml.SafeLoader, node: Any) -> bool:
    text = loader.construct_scalar(node)
    if not re.fullmatch(BOOLEAN, text):
        raise _refused(f"{text!r} is neither true nor false", node)
    return text.lower() == "true"


for _kind, _pattern, _first in (
    ("null", NULL, ["~", "n", "N", ""]),
    ("bool", BOOLEAN, list("tTfF")),
    ("int", INTEGER, list("-+0123456789")),
    ("float", NUMBER, list("-+.0123456789")),
    ("merge", "<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)


def _bound(events: Iterator[yaml.Event]) -> None:
    """NotYaml for a text whose values are too many or too deep, before any of them is built."""
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    count = 0
    for event in events:
        line = event.start_mark.line + 1
        name = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if any(name == outer for outer, _ in opened):
                raise NotYaml(f"*{name} stands inside itself", line)
            count += sizes.get(name or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((name, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            name, before = opened.pop()
            sizes |= {name: count - before} if name else {}
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            sizes |= {name: 1} if name else {}
        if len(opened) > DEPTH:
            raise NotYaml(f"more than {DEPTH} lists and mappings in one another", line)
        if count > VALUES:
            raise NotYaml(f"more than {VALUES:,} values", line)
