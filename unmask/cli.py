"""The command line: a table of verbs, each a few lines that call the package.

What a user did wrong is one line on stderr and exit code 2; a run ended by a signal exits with 128 + its number.
Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unmask.errors import UserError

app = typer.Typer(
    name="unmask",
    help="Train diffusion language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the `unmask` command."""
    try:
        app()
    except UserError as error:
        print(f"unmask: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


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


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to it, such as training.steps=100.", metavar="key.path=value")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model, or go on with a run that was interrupted."""
    from unmask.config import Config

    settings = Config.load(config, overrides)
    if dry_run:
        from unmask.training.plan import plan, table

        facts = plan(settings)
        print(json.dumps(facts, indent=1) if as_json else table(facts))
        return
    from unmask.training.trainer import Trainer

    summary = Trainer(config=settings).train()
    again = " ".join(["unmask train", str(config), *(overrides or [])])
    print(json.dumps(summary.facts()) if as_json else summary.sentence(again))
    if summary.interrupted is not None:
        raise typer.Exit(128 + summary.interrupted)


@app.command()
def prepare(
    source: Annotated[Path, typer.Argument(help="A text folder, a text file or JSONL.")],
    output: Annotated[Path, typer.Argument(help="Folder of the dataset to write.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or file of the tokeniser.")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the dataset that is there.")] = False,
) -> None:
    """Tokenise text into a dataset that training reads."""
    from unmask.data import prepare as prepare_dataset

    manifest: Any = prepare_dataset(source, output, tokenizer, skip_bad=skip_bad, force=force)
    print(f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens")


if __name__ == "__main__":
    main()
