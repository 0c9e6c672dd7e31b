"""config.json and the tokeniser of a Hugging Face folder, read from the disk alone; code that it names is never run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.files import read_json


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; UserError where it is none."""
    return read_json(folder / "config.json")


def fetching(name: str | Path) -> str:
    """How to get a model first whose name on a hub was given for a path: what follows the sentence that there is none.

    "" for a path whose folder is there.
    """
    found = re.fullmatch(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)", str(name))
    if found is None or Path(name).parent.exists():
        return ""
    folder = f"models/{found[1]}"
    return f"; if that is its name on a hub, fetch it first: hf download {name} --local-dir {folder}, and name {folder}"


def is_known(raw: dict[str, Any]) -> bool:
    """Whether transformers knows the model type of a config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in CONFIG_MAPPING


def vocabulary_of(tokenizer: Any) -> int:
    """One more than the largest id of a tokeniser: more than `len(tokenizer)` where its ids have gaps."""
    return 1 + max([*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder], default=-1)


def open_tokenizer(folder: Path) -> Any:
    """A folder's tokeniser; UserError where its files are damaged, or only code in the folder could make it."""
    try:
        tokenizer = _tokenizer(folder)
        if not isinstance(limit := tokenizer.model_max_length, int | float):
            raise UserError(f"{folder / 'tokenizer_config.json'}: model_max_length={limit!r} is no number; correct it")
        return tokenizer
    except UserError:
        raise
    except Exception as error:  # whatever transformers and tokenizers raise for a damaged file
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        kind = type(error).__name__
        raise UserError(f"{folder}: its tokeniser cannot be read: {kind}: {reason}; copy its files again") from error


def _tokenizer(folder: Path) -> Any:
    """Code that the folder names is not run.

    Beside a model that transformers does not know its own files say what it is; a class of another name over vocab.json
    and merges.txt is Qwen's byte-level BPE, as Dream's and Fast-dLLM's are.
    """
    from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Tokenizer

    options: dict[str, Any] = {"local_files_only": True}
    if not (folder / "config.json").exists() or is_known(read_config(folder)):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
    if _names_code(folder):
        if (folder / "tokenizer.json").exists():
            return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
        if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
            return Qwen2Tokenizer.from_pretrained(str(folder), **options)
        raise UserError(f"{folder}: code in the folder makes its tokeniser, and is not run; add a tokenizer.json")
    return AutoTokenizer.from_pretrained(str(folder), config=PretrainedConfig(), trust_remote_code=False, **options)


def _names_code(folder: Path) -> bool:
    """Whether tokenizer_config.json names a class in the folder."""
    path = folder / "tokenizer_config.json"
    return path.exists() and "auto_map" in read_json(path)
