"""What every part of a config is: a pydantic model that refuses unknown keys and tells a mistake in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from unmask.config.synonyms import known_as
from unmask.errors import UserError
from unmask.registry import Registry, nearest


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types in an annotation: int, float and NoneType of `tuple[int, float] | None`."""
    arguments = () if get_origin(annotation) is Literal else get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _kinds(argument)


class Section(BaseModel):
    """Settings that a user writes; a mistake in them is a UserError.

    Unknown keys are refused and so are, wherever a number is meant, true and false, infinities, nan, and whole numbers
    of more than 64 bits.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(f"{type(self).__name__}: {_sentence(error, type(self))}") from None

    # Sections inside sections are validated by pydantic itself, which then knows the whole path of a mistake.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(cls, tree: dict[str, Any], source: str = "config") -> Self:
        """Validate a nested dict; errors become one sentence naming `source` and the path."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"{source}: {_sentence(error, cls)}") from None

    def given(self) -> list[str]:
        """The keys that differ from their defaults."""
        fields = type(self).model_fields.items()
        return [key for key, field in fields if getattr(self, key) != field.default]

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1."""
        if info.field_name is not None:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, bool) and bool not in kinds and kinds & {int, float}:
                    raise ValueError(f"{item} is no number: give one")
                if isinstance(item, int) and abs(item) >= 2**63:
                    raise ValueError(f"{item} is too large: it takes more than 64 bits")
        return value


def _sentence(error: ValidationError, root: type[BaseModel]) -> str:
    """What is wrong with the first key that is; the members of a union that were tried are told as one."""
    errors = error.errors()
    first, keys = errors[0], [_key(root, one["loc"]) for one in errors]
    path, more = ".".join(map(str, keys[0])), len(set(keys)) - 1
    if first["type"] == "extra_forbidden":
        known = _keys(root, keys[0][:-1])
        text = f"unknown key {path!r}{_hint(root, path, known)}; valid here: {', '.join(known)}"
    elif first["type"] == "value_error":
        text = f"{path + ': ' if path else ''}{first['ctx']['error']}"
    elif first["type"] == "model_type":
        text = f"{path}={first['input']!r}: it takes the keys {type_name(_annotation(root, keys[0]))}"
    elif first["type"] == "missing":
        text = f"{path} is missing"
    elif not path:
        text = f"it takes {type_name(root)}, not {first['input']!r}"
    elif keys[0] != first["loc"]:
        text = f"{path}={first['input']!r}: it takes {type_name(_annotation(root, keys[0]))}"
    else:
        text = f"{path}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {more} more)" if more else "")


def keys() -> dict[str, Any]:
    """Every key of a config as a user writes it, options of the objectives among them, and what it may hold."""
    from unmask.config import Config

    found = dict(_leaves(Config))
    for objective in OWNERS["objective"].names():
        fields = OWNERS["objective"][objective].model_fields
        found |= {f"objective.{key}": field.annotation for key, field in fields.items() if not field.exclude}
    return found


def _leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, what it may hold) of everything in a section and the sections in it."""
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _leaves(inner, f"{prefix}{key}.")
        elif not field.exclude:
            yield prefix + key, inner


def _hint(root: type[BaseModel], path: str, here: list[str]) -> str:
    """A hint for an unknown key: whose it is, the same name in another section, a similar name here, then in any."""
    from unmask.config import Config

    objectives = OWNERS["objective"]
    of_objective = root is not Config and any(root is objectives[name] for name in objectives.names())
    if not of_objective and root not in (Config, *(field.annotation for field in Config.model_fields.values())):
        return _meant(known_as(path, here)) or nearest(path, here)  # options of something that no config holds
    if of_objective:
        others = [name for name in objectives.names() if path in objectives[name].model_fields]
        if others:
            return f" (an option of {', '.join(others)}: leave it out)"
    last, elsewhere = path.split(".")[-1], list(keys())
    same = [key for key in elsewhere if key.split(".")[-1] == last and key != path]
    if same:
        return _meant(same[0])
    if other := known_as(last, elsewhere):
        return _meant(other)
    similar = difflib.get_close_matches(last, [key.split(".")[-1] for key in elsewhere], n=1, cutoff=0.8)
    found = [key for key in elsewhere if key.split(".")[-1] in similar]
    return nearest(last, here) or _meant(found[0] if found else None)


def _meant(key: str | None) -> str:
    return f" (did you mean {key!r}?)" if key else ""


def _key(root: Any, path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of an error's path that a user wrote: pydantic adds the member of a union that it tried."""
    key: list[int | str] = []
    model = root
    for part in path:
        if isinstance(part, str):
            if model is None:
                break
            field = model.model_fields.get(part)
            model = _section(field.annotation) if field else None
        key.append(part)
    return tuple(key)


def _annotation(root: Any, path: tuple[int | str, ...]) -> Any:
    """What the field at `path` may hold; of a list, the list."""
    annotation: Any = root
    for part in path:
        if isinstance(part, str):
            annotation = _section(annotation).model_fields[part].annotation
    return annotation


def _keys(model: Any, path: tuple[int | str, ...]) -> list[str]:
    model = _section(_annotation(model, path))
    return [name for name, field in model.model_fields.items() if not field.exclude]


def _section(annotation: Any) -> Any:
    """The model inside `Model | None`, `list[Model]` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_section, get_args(annotation)) if found), None)


#: Parts of a config whose keys belong to what they name; asked when a key is looked for, not before.
OWNERS = Registry("section", {"objective": "unmask.objectives:objectives"})

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}


def type_name(annotation: Any) -> str:
    """An annotation in words: choices are listed, None is "empty"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        parts = [type_name(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*parts, "empty"] if type(None) in arguments else parts)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(map(type_name, arguments))}]"
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return NAMES.get(annotation, str(annotation))
