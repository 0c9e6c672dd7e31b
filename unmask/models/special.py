"""The tokens that begin, end and fill texts: of a model that starts from a configuration the tokeniser's.

transformers gives most configurations the ids of the tokeniser that its first model came with (Llama: 1 and 2), which
are ordinary words of any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def with_special_tokens(fields: dict[str, Any], default: Any, tokenizer: Any) -> dict[str, Any]:
    """The fields of a configuration with the tokeniser's ids where they give none; none without a tokeniser.

    default: transformers' configuration of the type; an id that the embedding has no row for is left out.
    """
    found = dict(fields)
    own = default.to_dict()
    inner = fields.get("text_config", {})
    if "text_config" in own and isinstance(inner, dict):
        found["text_config"] = with_special_tokens(inner, default.text_config, tokenizer)
    rows = found.get("vocab_size", getattr(default, "vocab_size", None))
    for kind in KINDS:
        if kind in own and kind not in fields:
            token = getattr(tokenizer, kind, None)
            fits = token is not None and (not isinstance(rows, int) or token < rows)
            found[kind] = token if fits else None
    return found


def complete(model: PreTrainedModel, tokenizer: Any) -> None:
    """Give a model's configurations the tokeniser's ids where neither of the two has one."""
    from transformers import GenerationConfig

    if model.generation_config is None:
        model.generation_config = GenerationConfig.from_model_config(model.config)
    config = model.config.get_text_config()
    for kind in KINDS:
        token, known = getattr(tokenizer, kind, None), getattr(model.generation_config, kind, None)
        own = getattr(config, kind, None)
        if known is None and (token if own is None else own) is not None:
            setattr(model.generation_config, kind, token if own is None else own)
        if own is None and token is not None and token < model.get_input_embeddings().weight.shape[0]:
            setattr(config, kind, token)


def savable(model: PreTrainedModel) -> None:
    """Make a generation_config valid, without which transformers writes none; UserError where it cannot be made so."""
    config = model.generation_config
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # published files often have a temperature, and leave this out
        try:
            config.validate(strict=True)
        except ValueError as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(f"the model's generation_config.json is not valid, and cannot be exported: {why}") from None


def read_generation(model: PreTrainedModel, folder: Path) -> None:
    """Take a folder's generation_config.json, where it has one: its end tokens may be several. UserError for a damaged
    file."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers raises for values that are none
        raise UserError(f"{path}: cannot be used: {' '.join(str(error).split())[:200]}") from None


def end_tokens(model: PreTrainedModel, tokenizer: Any, rows: int) -> list[int]:
    """The ids that end a text: the tokeniser's, and those of generation_config.json that are among the `rows` of
    the model's embedding.

    Beside a tokeniser, what follows from config.json alone says nothing: often it is transformers' default. UserError
    for others than numbers.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    config = model.generation_config
    found = getattr(config, "eos_token_id", None)
    if tokenizer is not None and own is not None and getattr(config, "_from_model_config", False):
        found = None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise UserError(f"eos_token_id={found!r} of generation_config.json: give the id of a token, or a list of them")
    return [*([] if own is None else [own]), *(each for each in ids if 0 <= each < rows)]
