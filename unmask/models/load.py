"""Load any decoder: a checkpoint of any family, or a configuration with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unmask.attention import register
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.hf import open_tokenizer
from unmask.models import dropout, experts, positions
from unmask.models.adapters import lora
from unmask.models.decoder import check_attention
from unmask.models.families import family_at, family_of_model, sound
from unmask.models.families.materialise import fill, move, needs_whole, stand_ins
from unmask.models.families.trained import masks
from unmask.models.families.transformers import OFFLINE, check_file, random_model
from unmask.models.fused.fuse import fuse
from unmask.models.mask_token import ensure_mask_token
from unmask.models.prove import proofs_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DTYPES = ("float32", "float64", "bfloat16", "float16")


class LoadedModel(NamedTuple):
    """A model whose attention takes a Plan, its tokeniser and the id of its mask token, where it has these."""

    model: PreTrainedModel
    tokenizer: Any
    mask_token_id: int | None


def load(
    config: ModelConfig,
    tokenizer: Any = None,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    vocab_size: int | None = None,
    unread: bool = False,
    masked: bool = True,
) -> LoadedModel:
    """The model of `config`, with the mask token in place, its attention checked and its norms and MLPs fused.

    vocab_size fills a random model's `vocab_size` when the config leaves it out. The weights of a random model are a
    function of `seed`. unread: leave the weights of a folder to `materialise.fill`, after the model is divided. masked:
    whether tokens will be masked; else no mask token is added. UserError: no such folder, unknown type or key,
    attention that bypasses the interface.
    """
    register()
    dtype = getattr(torch, config.dtype)
    if config.name:
        path = Path(config.name)
        family, raw = family_at(path)
        model = family.open(path, raw, dtype)
        tokenizer = tokenizer or own_tokenizer(path)
    elif config.config:
        dropout.refuse(config.config)
        model = random_model(config.config, dtype, seed, vocab_size, tokenizer)
    else:
        raise UserError(
            "model: give model.name (a folder or .gguf file) or model.config (a transformers configuration)"
        )
    adapt(model)
    mask_token_id = _mask_token(model, tokenizer, config) if masked else None
    check_attention(model)
    dropout.off(model)
    proofs = proofs_of(model, device)
    if needs_whole(config.lora) or not unread:
        # What is put in four bits goes to the device as it is.
        fill(model, "cpu" if config.lora.quantize != "none" else device)
    if "mask_token" in config.lora.train:
        fill(model, device, [model.get_input_embeddings(), model.get_output_embeddings()])
    lora.quantize(model, config.lora, device)
    move(model, device)
    if config.fused:
        fuse(model, proofs)
    with stand_ins(model, device):  # peft puts adapters where weights are
        lora.adapt(model, config.lora, seed)
    return LoadedModel(model, tokenizer, mask_token_id)


def adapt(model: PreTrainedModel) -> None:
    """What every model needs whose weights have their dtype."""
    family_of_model(model).adapt(model)
    positions.fix(model)
    if not experts.use(model) and model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # transformers' grouped matmul of experts takes no fp64
    embedding = model.get_input_embeddings()
    if embedding.weight.numel() == 0:
        raise UserError(f"model.config: an embedding of {tuple(embedding.weight.shape)} holds nothing")
    # An embedding with padding_idx gives its row no gradient, and in several families that row is EOS, which we train.
    embedding.padding_idx = None


def _mask_token(model: PreTrainedModel, tokenizer: Any, config: ModelConfig) -> int | None:
    """See `ensure_mask_token`; None for a model whose noise has none."""
    requested, family = config.mask_token_id, family_of_model(model)
    if family.masked:
        trained = (family.title or type(model).__name__) if config.name and masks(model) else ""
        where = f"model.name={config.name}" if config.name else ""
        return ensure_mask_token(model, tokenizer, requested, trained=trained, where=where)
    if requested is not None:
        raise UserError(f"model.mask_token_id={requested}: {family.title} has no mask token; leave it out")
    return None


def own_tokenizer(path: Path) -> Any:
    """The tokeniser that lies with the checkpoint, or None; UserError for a file that is no .gguf, or is damaged."""
    from transformers import AutoTokenizer

    if path.is_file():
        check_file(path)
        try:
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **OFFLINE)
        except Exception as error:  # whatever transformers and gguf raise for a damaged file
            raise UserError(f"{path}: no tokeniser can be read from it: {sound.first_line(error)}") from error
    path = path / "hf" if (path / "state.json").exists() else path
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return open_tokenizer(path)
