"""Shell completion: the script that a shell sources, and what may stand in the place of `key.path=value`.

bash divides words at `=`, so that a value is completed by itself there and with its key in other shells.
"""

from __future__ import annotations

import os
from typing import Any, Literal, get_args, get_origin

from unmask.errors import UserError
from unmask.registry import nearest

PROGRAM = "unmask"
#: By which a shell asks, as typer names it.
VARIABLE = f"_{PROGRAM}_complete".upper()
SHELLS = ("bash", "zsh", "fish")
#: bash puts a space after what it has completed; after `key=` it must not.
NO_SPACE = '    [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace\n    return 0'


def answer_shells() -> None:
    """Let typer answer a shell that asks (it does so by itself only where its own two options are shown)."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init

        completion_init()


def script(shell: str) -> str:
    """What to source in `shell`; UserError for a shell that is not known."""
    from typer.completion import get_completion_script

    if shell not in SHELLS:
        raise UserError(f"unknown shell {shell!r}{nearest(shell, list(SHELLS))}; known: {', '.join(SHELLS)}")
    made = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)
    return made.replace("    return 0", NO_SPACE, 1) if shell == "bash" else made


def overrides(ctx: Any, incomplete: str) -> list[str]:
    """Keys of a config that begin like `incomplete`, or the values that the key before `=` takes."""
    from unmask.config import keys

    return complete(ctx.params.get("overrides") or [], incomplete, keys())


def options(ctx: Any, incomplete: str) -> list[str]:
    """The same for the options of `unmask sample`."""
    from unmask.sampling.options import Options

    known = {name: field.annotation for name, field in Options.model_fields.items()}
    return complete(ctx.params.get("options") or [], incomplete, known)


def recipes(incomplete: str) -> list[str]:
    """Names of recipes."""
    from unmask.recipes import names

    return [name for name in names() if name.startswith(incomplete)]


def complete(before: list[str], incomplete: str, known: dict[str, Any]) -> list[str]:
    """The words that may stand after `before` and begin like `incomplete`; known: key -> what it may hold."""
    key, sign, value = incomplete.partition("=")
    if sign:  # zsh and fish: one word
        return [f"{key}={choice}" for choice in choices(known.get(key)) if choice.startswith(value)]
    words = [word for word in before if word != "="]
    if before and (before[-1] == "=" or (words[-1] in known and before[-2:-1] != ["="])):  # bash: `key`, `=`, value
        return [choice for choice in choices(known.get(words[-1])) if choice.startswith(incomplete)]
    return [f"{name}=" for name in known if name.startswith(incomplete)]


def choices(annotation: Any) -> list[str]:
    """The values that an annotation lists: of Literal, and true and false."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in choices(argument)]
