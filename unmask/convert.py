"""`convert`: from an autoregressive model to a folder that a diffusion model is trained from, with its config.

The folder holds the same weights, the tokeniser with a mask token, how it is to be decoded (so that `unmask eval` and
`unmask sample` measure it before any training) and run.yaml. Which token becomes the mask token, and what its row
starts as, is in `unmask.models.mask_token`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.config import Config, ModelConfig
from unmask.errors import UserError, as_path
from unmask.export.api import filled
from unmask.export.hf import write
from unmask.hf import read_config, vocabulary_of
from unmask.models import load
from unmask.models.families.trained import objective_of
from unmask.models.load import own_tokenizer
from unmask.models.positions import limit_of
from unmask.objectives import build
from unmask.parsing import yaml_text
from unmask.registry import nearest
from unmask.runs.open import OpenModel

#: What `--objective` takes: the objective's name and the options it is converted with.
RECIPES: dict[str, dict[str, Any]] = {
    "fast_dllm_v2": {"name": "fast_dllm_v2"},
    "block_diffusion": {"name": "block_diffusion", "variant": "a2d"},
    "i_dlm": {"name": "i_dlm"},
    "nemotron": {"name": "block_diffusion", "variant": "nemotron"},
}
ANNEALS = ("causal", "block-size")
#: Part of the training over which attention is annealed.
ANNEALED = 0.2
#: Tokens in a pack, unless the model has fewer positions.
PACK = 2048

HEADER = """\
# {source} becomes a diffusion model by {objective}, in blocks of {block_size}.
#
#   unmask prepare YOUR_TEXT data/train --tokenizer {folder}
#   unmask prepare HELD_OUT_TEXT data/held-out --tokenizer {folder}
#   unmask train {folder}/run.yaml
"""


@dataclass(frozen=True)
class Conversion:
    """What was written. row: where the mask token's embedding comes from: the model's own row, a padded row that no
    token had, or a new one (the mean of all rows, in the head too where that is not tied)."""

    path: str
    objective: str
    block_size: int
    mask_token: str | None
    mask_token_id: int
    row: str
    recipe: str


def convert(
    model: str | Path,
    output: str | Path,
    *,
    objective: str = "fast_dllm_v2",
    block_size: int = 32,
    mask_token: str | None = None,
    anneal: str | None = None,
    force: bool = False,
) -> Conversion:
    """Write the folder `output` from `model`, a transformers folder or a .gguf file.

    mask_token: the text of a token, known or new, or an id; anneal: "causal" (noisy rows come to see their block from
    the diagonal outwards) or "block-size" (LLaDA2's block schedule, of block_diffusion). Raises UserError.
    """
    options = recipe_of(objective, block_size, anneal)
    source, folder = as_path(model, "a model (MODEL)"), as_path(output, "the folder to write (OUT)")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise UserError(f"{folder}: is there already; name another folder, or overwrite it with --force")
    _check_apart(source, folder)
    fields = read_config(source) if (source / "config.json").is_file() else {}
    trained = objective_of(fields, str(source / "config.json"))
    if fields.get("mask_token_id") is not None if trained is None else trained.decoding.kind != "causal":
        raise UserError(f"{source}: is a diffusion model already: train from it with model.name")
    tokenizer = own_tokenizer(source) if source.exists() else None
    known = None if tokenizer is None else vocabulary_of(tokenizer)
    requested = _requested(mask_token, tokenizer)
    kept = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    settings = ModelConfig.parse({"name": str(source), "dtype": kept, "mask_token_id": requested}, str(source))
    loaded = load(settings, tokenizer)
    if loaded.mask_token_id is None:
        raise UserError(
            f"{source}: {type(loaded.model).__name__} is no autoregressive model: there is nothing to convert"
        )
    made = build(options["name"], {key: value for key, value in options.items() if key != "name"})
    opened = OpenModel(*loaded, made.model_copy(update={"mask_token_id": loaded.mask_token_id}))
    limit = limit_of(loaded.model.config)
    text = recipe_text(options, folder, source, block_size, PACK if limit is None else limit.tokens)
    with filled(folder) as staged:
        write(opened, staged)
        (staged / "run.yaml").write_text(text, encoding="utf-8")
    name = None if loaded.tokenizer is None else loaded.tokenizer.mask_token
    row = _row(loaded.model, loaded.mask_token_id, known)
    return Conversion(str(folder), objective, block_size, name, loaded.mask_token_id, row, str(folder / "run.yaml"))


def recipe_of(objective: str, block_size: int, anneal: str | None) -> dict[str, Any]:
    """The section `objective` of run.yaml; UserError for what is not known or does not go together."""
    if objective not in RECIPES:
        known = ", ".join(RECIPES)
        raise UserError(f"--objective {objective}: unknown{nearest(objective, list(RECIPES))}; known: {known}")
    if block_size < 1:
        raise UserError(f"--block-size {block_size}: give a number of tokens, at least 1")
    if anneal not in (None, *ANNEALS):
        raise UserError(f"--anneal {anneal}: unknown; known: {', '.join(ANNEALS)}")
    options = {**RECIPES[objective], "block_size": block_size}
    if anneal == "causal":
        return {**options, "anneal": ANNEALED}
    if anneal == "block-size":
        if objective != "block_diffusion":
            raise UserError(f"--anneal block-size is for --objective block_diffusion: {objective} has one block size")
        del options["block_size"]
        return {**options, "block_schedule": schedule(block_size)}
    return options


def schedule(block_size: int) -> list[dict[str, Any]]:
    """LLaDA2's warm-up, stable, decay: blocks of one token, the autoregressive model, grow until a document is one
    block, and come back to `block_size`."""
    growing = [size for size in (1, 4, 32, 64) if size <= block_size]
    shrinking = [size for size in (2048, 256) if size > block_size]
    phases: list[dict[str, Any]] = [
        {"until": round(0.15 * (number + 1) / len(growing), 4), "size": size} for number, size in enumerate(growing)
    ]
    phases.append({"until": 0.75, "size": "full"})
    phases += [{"until": 0.85 + 0.05 * number, "size": size} for number, size in enumerate(shrinking)]
    return [*phases, {"size": block_size}]


def recipe_text(options: dict[str, Any], folder: Path, source: Path, block_size: int, positions: int) -> str:
    """run.yaml, valid to the letter."""
    tree = {
        "model": {"name": str(folder), **({"mask_noise_steps": 200} if "block_schedule" in options else {})},
        "data": {"train": "data/train", "validation": "data/held-out", "pack_tokens": min(PACK, positions)},
        "objective": options,
        "optimizer": {"learning_rate": 2e-5, "weight_decay": 0.0},
        "schedule": {"name": "wsd", "warmup": 0.03},
        "training": {"epochs": 1, "batch_size": 16, "precision": "bf16", "checkpointing": "selective"},
        "checkpoint": {"path": f"runs/{folder.name}", "every": 500},
        "evaluation": {"every": 500, "packs": 32, "ar": True},
    }
    Config.parse(tree, "run.yaml")
    title = next(name for name, made in RECIPES.items() if made.items() <= options.items())
    header = HEADER.format(source=source.name, objective=title, block_size=block_size, folder=folder)
    return header + yaml_text(tree)


def _check_apart(source: Path, folder: Path) -> None:
    """UserError where the model that is read lies in the folder that is written."""
    read, written = source.resolve(), folder.resolve()
    if written in (read, read.parent if read.is_file() else read):
        raise UserError(
            f"{folder}: holds the model that is converted, which would be lost; name another folder for OUT"
        )


def _requested(mask_token: str | None, tokenizer: Any) -> int | None:
    """The id that is asked for; a text becomes the tokeniser's mask token."""
    if mask_token is None:
        return None
    if not mask_token.strip() or re.fullmatch(r"-\d+", mask_token):
        raise UserError(f"--mask-token {mask_token!r}: give the text of a token, or an id from 0 on")
    if mask_token.isdecimal():
        return int(mask_token)
    if tokenizer is None:
        raise UserError(f"--mask-token {mask_token}: the model has no tokeniser that could know it; give an id")
    tokenizer.add_special_tokens({"mask_token": mask_token})
    return tokenizer.mask_token_id


def _row(model: Any, mask: int, known: int | None) -> str:
    """Where the mask token's embedding comes from. known: tokens that the tokeniser had."""
    weight = model.get_input_embeddings().weight.detach()
    if mask == len(weight) - 1 and torch.equal(weight[mask], weight[:mask].mean(0)):  # as `ensure_mask_token` grows it
        return f"a new row, which starts as the mean of the other {mask:,}"
    if known is not None and mask >= known:
        return "a padded row that no token had, as it was"
    return "a token that the model has, as it was"
