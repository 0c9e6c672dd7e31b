"""Load any transformers decoder: a folder, a GGUF file, or a configuration with random weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unmask.attention import NAME, register
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.files import read_json
from unmask.hf import fetching, is_known, open_tokenizer, read_config
from unmask.models import dropout, experts, lora, positions, sound
from unmask.models.bars import bars_in_terminals_only
from unmask.models.decoder import check_attention
from unmask.models.families import families, family_of, open_folder
from unmask.models.families.deferred import Deferred
from unmask.models.families.folder import fill, shapes, told
from unmask.models.families.layout import Own, check_mask
from unmask.models.families.stored import INDEX, Stored, is_own, read_index
from unmask.models.fuse import fuse
from unmask.models.mask_token import ensure_mask_token
from unmask.models.special import read_generation, with_special_tokens
from unmask.models.trained import DIFFUSION_GEMMA, family_title, masks
from unmask.registry import nearest

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
    deferred: Deferred | None = None,
    masked: bool = True,
) -> LoadedModel:
    """The model of `config`, with the mask token in place, its attention checked and its norms and MLPs fused.

    vocab_size fills a random model's `vocab_size` when the config leaves it out. The weights of a random model are a
    function of `seed`. deferred: takes note of the weights of a folder that are read later. masked: whether tokens will
    be masked; else no mask token is added. UserError: no such folder, unknown type or key, attention that bypasses the
    interface.
    """
    register()
    dtype = getattr(torch, config.dtype)
    if config.name:
        model = _from_checkpoint(Path(config.name), dtype, deferred)
        tokenizer = tokenizer or own_tokenizer(Path(config.name))
    elif config.config:
        dropout.refuse(config.config)
        model = _from_config(config.config, dtype, seed, vocab_size, tokenizer)
    else:
        raise UserError(
            "model: give model.name (a folder or .gguf file) or model.config (a transformers configuration)"
        )
    adapt(model)
    mask_token_id = _mask_token(model, tokenizer, config) if masked else None
    lora.quantize(model, config.lora, device)
    if deferred is not None and deferred.names:
        deferred.move(model, device)
    else:
        model.to(device)
    check_attention(model)
    dropout.off(model)
    if config.fused:
        fuse(model)
    lora.adapt(model, config.lora, seed)
    return LoadedModel(model, tokenizer, mask_token_id)


def adapt(model: PreTrainedModel) -> None:
    """What every model needs whose weights have their dtype."""
    over_rows(model)
    positions.fix(model)
    if not experts.use(model) and model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # transformers' grouped matmul of experts takes no fp64
    embedding = model.get_input_embeddings()
    if embedding.weight.numel() == 0:
        raise UserError(f"model.config: an embedding of {tuple(embedding.weight.shape)} holds nothing")
    # An embedding with padding_idx gives its row no gradient, and in several families that row is EOS, which we train.
    embedding.padding_idx = None


def auto_model(model_type: str) -> Any:
    """The class of transformers that makes a model of this type for generation."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if model_type == DIFFUSION_GEMMA else AutoModelForCausalLM


def over_rows(model: PreTrainedModel) -> None:
    """An encoder and a decoder with the same weights become one decoder; other models stay as they are."""
    if model.config.model_type == DIFFUSION_GEMMA:
        from unmask.models.families import diffusion_gemma

        diffusion_gemma.over_rows(model)


def _mask_token(model: PreTrainedModel, tokenizer: Any, config: ModelConfig) -> int | None:
    """See `ensure_mask_token`; None for a model whose noise has none."""
    requested = config.mask_token_id
    if model.config.model_type != DIFFUSION_GEMMA:
        trained = family_title(model) if config.name and masks(model) else ""
        where = f"model.name={config.name}" if config.name else ""
        return ensure_mask_token(model, tokenizer, requested, trained=trained, where=where)
    if requested is not None:
        raise UserError(f"model.mask_token_id={requested}: DiffusionGemma has no mask token; leave it out")
    return None


def _from_checkpoint(path: Path, dtype: torch.dtype, deferred: Deferred | None) -> PreTrainedModel:
    if not path.exists():
        raise UserError(
            f"model.name={path}: no such folder or file (models are loaded from disk, not from a hub){fetching(path)}"
        )
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME, "local_files_only": True}
    options["trust_remote_code"] = False
    folder = path
    if path.is_file():
        _check_file(path)
        from transformers import GgufConfig

        folder, options["gguf_file"] = path.parent, path.name
        options["quantization_config"] = GgufConfig(dequantize=True)  # blocks can be neither trained nor saved
    elif not (path / "config.json").exists():
        runs = import_module("unmask.runs.open")

        if (step := runs.step_of(path)) is None:
            raise UserError(f"model.name={path}: no config.json in this folder, and it is no run with a checkpoint")
        return runs.stored_model(step, dtype)
    elif (family := family_of(raw := _read(path), path / "config.json")) is not None:
        return open_folder(path, family, raw, dtype, deferred)
    else:
        _check_type(path, raw)
    stored = _own_tensors(path) if path.is_dir() else None
    try:
        if deferred is not None and stored is not None:
            model = _deferring(stored, read_config(path), dtype, deferred)
            if model is not None:
                return model
        with bars_in_terminals_only(), _without_report():
            model, info = auto_model(_type_of(folder)).from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever transformers, torch and their readers raise for damaged files
        odd = sound.odd_field(read_config(path)) if path.is_dir() else ""
        raise UserError(f"model.name={path}: transformers cannot load it: {_first_line(error)}{odd}") from error
    _check_filled(path, info, stored)
    _check_tied(path, model)
    return model


class _NoReport(logging.Filter):
    """Drops what `_check_filled` and `_check_tied` say in a sentence; tables of failed conversions say more."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        return not ("LOAD REPORT" in said and "CONVERSION" not in said or "we will NOT tie them" in said)


@contextmanager
def _without_report() -> Iterator[None]:
    logger, quiet = logging.getLogger("transformers.modeling_utils"), _NoReport()
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def _check_filled(path: Path, info: dict[str, Any], stored: Stored | None) -> None:
    """UserError unless every weight of the model was in the folder and every tensor of the folder is in the model.

    Of the tensors transformers leaves out those that its class of the model names (MTP layers, derived buffers).
    """
    if info["missing_keys"]:
        raise UserError(
            f"model.name={path}: the checkpoint holds no {_some(info['missing_keys'])}, which would stay random"
        )
    for name, theirs, wanted in info["mismatched_keys"]:
        file = stored.file.get(name, path) if stored is not None else path
        raise UserError(f"{file}: {name} has the shape {list(theirs)}, config.json says {list(wanted)}")
    if info["unexpected_keys"] and path.is_dir():
        raise UserError(f"model.name={path}: holds {_some(info['unexpected_keys'])}, for which the model has no place")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def _read(folder: Path) -> dict[str, Any]:
    """A folder's config.json; UserError for a mask token in it that is none."""
    raw = read_config(folder)
    sound.check(raw, folder / "config.json")
    if (generation := folder / "generation_config.json").exists():
        sound.check(read_json(generation, "copy it again, or remove it"), generation)
    for index in (INDEX, "pytorch_model.bin.index.json"):
        if (folder / index).exists():
            read_index(folder / index)
    try:
        check_mask(raw)
    except UserError as error:
        raise UserError(f"model.name={folder}: {error}") from None
    return raw


def _own_tensors(folder: Path) -> Stored | None:
    """The tensors that transformers would read; None where these are not safetensors, or quantised."""
    raw = read_config(folder)
    if raw.get("quantization_config") or raw.get("transformers_weights") or not is_own(folder):
        return None
    stored = Stored(folder)
    stored.check_dtypes(name for name in stored.names if name.endswith((".weight", "_proj")))
    return stored


def _check_tied(path: Path, model: PreTrainedModel) -> None:
    """UserError for tensors that config.json ties and transformers has not tied, because others are stored.

    Whoever opens the run would tie them again, and lose one.
    """
    for ours, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(ours) is not model.get_parameter(other):
            raise UserError(
                f"model.name={path}: config.json ties {ours} to {other}, and the folder holds another tensor for each; "
                f"say in config.json that they are not tied (tie_word_embeddings=false)"
            )


def empty_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that config.json describes, its attention ours, its weights not yet written."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    register()
    raw = _read(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            model = auto_model(config.model_type).from_config(config, dtype=dtype, attn_implementation=NAME)
        model.tie_weights()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever transformers raises for values that do not go together
        told = f"no model can be built from it: {_first_line(error)}{sound.odd_field(raw)}"
        raise UserError(f"{folder / 'config.json'}: {told}") from error
    read_generation(model, folder)
    over_rows(model)
    return model


def _deferring(stored: Stored, raw: dict[str, Any], dtype: torch.dtype, deferred: Deferred) -> PreTrainedModel | None:
    """The model of a folder that holds what transformers calls its own, by these names; None for any other folder."""
    if DIFFUSION_GEMMA in raw.values():
        return None
    model = empty_model(stored.folder, dtype)
    parts = list(Own().parts(shapes(model), raw, False))
    if {part.theirs for part in parts} != stored.names:
        return None  # transformers renames, merges or leaves out some
    deferred.lend(model, parts, stored)
    fill(model, parts, stored, Own(), deferred.names)
    return model.eval()


def _from_config(
    fields: dict[str, Any], dtype: torch.dtype, seed: int, vocab_size: int | None, tokenizer: Any
) -> PreTrainedModel:
    from transformers import AutoConfig

    fields = dict(fields)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise UserError("model.config: model_type is missing (for example qwen3 or llama)")
    if not isinstance(kind, str):
        raise UserError(f"model.config.model_type={kind!r}: give a name, such as qwen3 or llama")
    sound.check(fields, "model.config")
    if vocab_size is not None:
        sized = fields if kind != DIFFUSION_GEMMA else fields.setdefault("text_config", {})
        sized.setdefault("vocab_size", vocab_size)
    try:
        default = AutoConfig.for_model(kind)
    except ValueError:
        raise UserError(f"model.config.model_type={kind!r}: transformers has no such model type") from None
    # attribute_map: other names of fields, often those that config.json uses (num_experts of Qwen3-MoE).
    known = {*default.to_dict(), *default.attribute_map, "head_dim", "rope_theta", "rope_scaling"}
    for key in fields:
        if key not in known:
            raise UserError(f"model.config: {kind} has no field {key!r}{nearest(key, sorted(known))}")
    try:
        config = AutoConfig.for_model(kind, **with_special_tokens(fields, default, tokenizer))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return auto_model(kind).from_config(config, dtype=dtype, attn_implementation=NAME)
    except Exception as error:  # whatever transformers raises for values that do not go together
        raise UserError(f"model.config: {kind} cannot be built from it: {_first_line(error)}") from error


def _check_type(folder: Path, raw: dict[str, Any]) -> None:
    """UserError for a model type that neither transformers nor a family of ours runs; remote code is never run."""
    if not is_known(raw):
        known = ", ".join(families[name].title for name in families.names())
        raise UserError(
            f"model.name={folder}: config.json has model_type={raw.get('model_type')!r}, which transformers does not "
            f"know and code in the folder is not run; of other models these are known: {known}"
        )


def _check_file(path: Path) -> None:
    if path.suffix != ".gguf":
        raise UserError(f"model.name={path}: a file must be .gguf; for safetensors name the folder")


def _type_of(folder: Path) -> str:
    """The model type that a folder's config.json gives, "" without one."""
    return read_config(folder).get("model_type", "") if (folder / "config.json").exists() else ""


def own_tokenizer(path: Path) -> Any:
    """The tokeniser that lies with the checkpoint, or None; UserError for a file that is no .gguf, or is damaged."""
    from transformers import AutoTokenizer

    if path.is_file():
        _check_file(path)
        try:
            options = {"local_files_only": True, "trust_remote_code": False}
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options)
        except Exception as error:  # whatever transformers and gguf raise for a damaged file
            raise UserError(f"{path}: no tokeniser can be read from it: {_first_line(error)}") from error
    path = path / "hf" if (path / "state.json").exists() else path
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return open_tokenizer(path)


def _first_line(error: Exception) -> str:
    """The most telling line: StrictDataclass errors name the field first and what is wrong with it last."""
    lines = [line.strip() for line in told(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if lines[0].startswith(("Validation error", "Class validation error")) else lines[0]
