"""config.json and the tokeniser of a Hugging Face folder, read from the disk alone; code that it names is never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unmask.errors import UserError


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; UserError where it is none."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds no JSON object")
    return raw


def is_known(raw: dict[str, Any]) -> bool:
    """Whether transformers knows the model type of a config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return raw.get("model_type") in CONFIG_MAPPING


def open_tokenizer(folder: Path) -> Any:
    """A folder's tokeniser; beside a model that transformers does not know, what its own files say."""
    from transformers import AutoTokenizer, PretrainedConfig

    options: dict[str, Any] = {}
    if (folder / "config.json").exists() and not is_known(read_config(folder)):
        options["config"] = PretrainedConfig()
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
