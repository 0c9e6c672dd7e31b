"""`unmask export` and `unmask convert`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from unmask.cli.app import Ema, Force, MaskTokenId, ObjectiveName, Output, weights
from unmask.cli.say import conversion, show


@dataclass
class Read:
    """What of the checkpoint is exported, and as what it is read."""

    ema: Ema = False
    objective: ObjectiveName = None
    mask_token_id: MaskTokenId = None


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, or one of its steps.")],
    output: Output,
    read: Read,
    format: Annotated[
        str | None,
        typer.Option(
            help="hf: a transformers folder (adapters merged); family: the model's original layout; peft: adapters."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype, such as bfloat16; default: as trained.")] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the folder, its files and their sizes.")] = False,
) -> None:
    """Write a trained model in a format that other programs open."""
    from unmask.export import export as run
    from unmask.export import facts

    own: dict[str, Any] = {"objective": read.objective, "mask_token_id": read.mask_token_id}
    folder = run(weights(checkpoint, read.ema), output, format=format, dtype=dtype, force=force, **own)
    show(facts(folder), lambda found: found["path"], as_json)


@dataclass
class Convert:
    """How `convert` makes a diffusion model."""

    objective: Annotated[str, typer.Option(help="fast_dllm_v2, block_diffusion, i_dlm or nemotron.")] = "fast_dllm_v2"
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 32
    mask_token: Annotated[str | None, typer.Option(help="An existing or new token, or an id.")] = None
    anneal: Annotated[str | None, typer.Option(help="causal: attention in blocks; block-size: block sizes.")] = None


def convert(
    model: Annotated[Path, typer.Argument(help="A transformers folder, or a .gguf file.")],
    output: Output,
    how: Convert,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Make a diffusion model of an autoregressive one: mask token, config, and the run that trains it."""
    from unmask.convert import convert as run

    made = run(model, output, **vars(how), force=force)
    show(asdict(made), conversion, as_json)
