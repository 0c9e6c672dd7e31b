"""The table of verbs, and what they share.

A verb is a function whose annotations are typer's; its module is imported when the verb is used. Other packages add
theirs with an entry point of group `unmask.verbs`.
"""

from __future__ import annotations

import inspect as introspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup
from typer.main import get_command

from unmask.cli import complete
from unmask.errors import UserError
from unmask.registry import Registry

#: The verbs, in the order of `unmask --help`.
BUILTIN = {
    "train": "unmask.cli.train:train",
    "inspect": "unmask.cli.train:inspect",
    "prepare": "unmask.cli.prepare:prepare",
    "sample": "unmask.cli.sample:sample",
    "eval": "unmask.cli.evaluate:evaluate",
    "export": "unmask.cli.export:export",
    "convert": "unmask.cli.export:convert",
    "compare": "unmask.cli.small:compare",
    "doctor": "unmask.cli.small:doctor",
    "recipes": "unmask.cli.small:recipes",
    "completion": "unmask.cli.small:completion",
    "demo": "unmask.cli.small:demo",
}
verbs = Registry("verb", BUILTIN)

#: What other programs call a verb, or a thing that a verb does.
SYNONYMS = {
    **dict.fromkeys(("generate", "infer", "inference"), "unmask sample, or unmask eval --generate for scores"),
    **dict.fromkeys(("chat", "serve"), "unmask sample --chat"),
    **dict.fromkeys(("finetune", "fine-tune", "fit", "pretrain", "sft"), "unmask train"),
    **dict.fromkeys(("evaluate", "test", "benchmark"), "unmask eval"),
    **dict.fromkeys(("preprocess", "tokenize", "pack"), "unmask prepare"),
    **dict.fromkeys(("merge", "save", "push"), "unmask export"),
    **dict.fromkeys(("plan", "dry-run"), "unmask train CONFIG --dry-run"),
    "resume": "unmask train with the same config, or with config.yaml of the run's folder",
}

#: Options and arguments of several verbs.
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to it, such as training.steps=100.", metavar="key.path=value", autocompletion=complete.overrides
    ),
]
Checkpoint = Annotated[Path, typer.Argument(help="A run's folder, one of its steps, or an exported folder.")]
Ema = Annotated[bool, typer.Option("--ema", help="Use the EMA weights (training.ema).")]
ObjectiveName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How the model was trained, if its folder does not record it, such as block_diffusion,block_size=32.",
    ),
]
MaskTokenId = Annotated[
    int | None, typer.Option(min=0, help="The id of the model's mask token, if its folder does not record it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[Path, typer.Argument(help="Folder to write.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]


class _Verbs(TyperGroup):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.commands: Any = dict.fromkeys([*BUILTIN, *verbs.names()])  # each is made when it is asked for

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands:
            program = verb = verbs[cmd_name]
            if not isinstance(verb, typer.Typer):
                program = typer.Typer(add_completion=False, rich_markup_mode=None)
                program.command(cmd_name)(grouped(verb))
            return get_command(program)
        if cmd_name in SYNONYMS and not ctx.resilient_parsing:
            raise UserError(f"unknown command {cmd_name!r}: use {SYNONYMS[cmd_name]}")
        return None


app = typer.Typer(
    name="unmask",
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train diffusion language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of the dataclasses that `verb` takes as options of their own."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    flat: dict[str, introspect.Parameter] = {}
    for name, parameter in introspect.signature(verb).parameters.items():
        if name not in groups:
            flat[name] = parameter.replace(annotation=hints[name])
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            annotation = inner[field.name]
            flat[field.name] = parameter.replace(name=field.name, default=field.default, annotation=annotation)

    @wraps(verb)
    def flattened(**values: Any) -> None:
        made = {name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
                for name, kind in groups.items()}  # fmt: skip
        verb(**values, **made)

    by_keyword = [parameter.replace(kind=introspect.Parameter.KEYWORD_ONLY) for parameter in flat.values()]
    flattened.__signature__ = introspect.Signature(by_keyword)  # type: ignore[attr-defined]
    flattened.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return flattened


def weights(checkpoint: Path, ema: bool) -> Path:
    """The path of a checkpoint's weights, or of its EMA weights."""
    return checkpoint / "ema" if ema else checkpoint


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"unmask {version('unmask')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train diffusion language models."""
