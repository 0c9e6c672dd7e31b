"""The default family: folders, and configurations, of transformers' own models."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask.attention import NAME
from unmask.errors import UserError
from unmask.hf import is_known
from unmask.models.families import sound
from unmask.models.families.bars import bars_in_terminals_only
from unmask.models.families.base import Family
from unmask.models.families.find import every_family, family_of_type
from unmask.models.families.folder import checked, shapes
from unmask.models.families.layout import Part
from unmask.models.families.materialise import FolderSource, leave, without_values
from unmask.models.families.stored import Stored, is_own
from unmask.models.special import read_generation, with_special_tokens
from unmask.registry import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What transformers is told of any checkpoint: nothing is fetched, and no code of it is run.
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class Transformers(Family):
    """A model of transformers under its own names, the experts of a layer one by one or stacked."""

    name, foreign = "transformers", False

    def open(self, path: Path, raw: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
        _check_type(path, raw)
        stored = _own_tensors(path, raw)
        with _refusing(path, raw):
            model = self._unread(path, raw, dtype, stored) if stored is not None else None
            if model is not None:
                return model
            model, info = self.pretrained(path, dtype)
        _check_filled(path, info, stored)
        _check_tied(path, model)
        return model

    def pretrained(self, folder: Path, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        """A model as transformers itself loads it, and what it says of that."""
        options |= {"dtype": dtype, "attn_implementation": NAME, **OFFLINE}
        with bars_in_terminals_only(), _without_report():
            return self.auto().from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )

    def _unread(self, path: Path, raw: dict[str, Any], dtype: torch.dtype, stored: Stored) -> PreTrainedModel | None:
        """The model, without weights, of a folder that holds what transformers calls its own, by these names.

        None for another folder: transformers renames, merges or leaves out some as it loads them.
        """
        with without_values():
            model = empty_model(path, dtype)
        stacked = any(name.endswith(".experts.down_proj") for name in stored.names)
        parts = list(self.parts(shapes(model), raw, stacked))
        if {part.theirs for part in parts} != stored.names:
            return None
        _keep_wide(model, dtype)
        checked(model, parts, stored, self)
        leave(model, FolderSource(parts, stored).read)
        return model.eval()

    def parts(self, shapes: Mapping[str, tuple[int, ...]], raw: dict[str, Any], merged: bool) -> Iterator[Part]:
        """merged: the experts of a layer are stacked, as the model has them."""
        return (Part(name, name) for name in shapes) if merged else super().parts(shapes, raw, merged)


def _keep_wide(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give parameters on `meta` that transformers keeps in another dtype as it loads them that dtype."""
    for pattern, wide in model._get_dtype_plan(dtype).items():
        for name, parameter in model.named_parameters():
            if re.search(pattern.replace("*", ".*"), name) and parameter.dtype != wide:
                parameter.data = parameter.data.to(wide)


def empty_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that a config.json of transformers describes, its attention ours, its weights not yet written."""
    from transformers import AutoConfig

    raw, where = sound.read(folder), folder / "config.json"
    try:
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
        family = family_of_type(config.model_type)
        model = family.empty(config, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever transformers raises for values that do not go together
        why = f"no model can be built from it: {sound.first_line(error)}{sound.odd_field(raw)}"
        raise UserError(f"{where}: {why}") from error
    read_generation(model, folder)
    family.adapt(model)
    return model


def random_model(
    fields: dict[str, Any], dtype: torch.dtype, seed: int, vocab_size: int | None, tokenizer: Any
) -> PreTrainedModel:
    """The model of a configuration (model.config), its weights a function of `seed`. vocab_size: where none is given.

    UserError for a type that transformers does not know, a field that the type has not, and values of no use.
    """
    from transformers import AutoConfig

    fields = dict(fields)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise UserError("model.config: model_type is missing (for example qwen3 or llama)")
    if not isinstance(kind, str):
        raise UserError(f"model.config.model_type={kind!r}: give a name, such as qwen3 or llama")
    sound.check(fields, "model.config")
    family = family_of_type(kind)
    if vocab_size is not None:
        family.sized(fields).setdefault("vocab_size", vocab_size)
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
            return family.auto().from_config(config, dtype=dtype, attn_implementation=NAME)
    except Exception as error:  # whatever transformers raises for values that do not go together
        raise UserError(f"model.config: {kind} cannot be built from it: {sound.first_line(error)}") from error


@contextmanager
def _refusing(path: Path, raw: dict[str, Any]) -> Iterator[None]:
    """Whatever transformers, torch and their readers raise for damaged files is a mistake of the checkpoint."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"transformers cannot load it: {sound.first_line(error)}{sound.odd_field(raw)}"
        raise UserError(f"model.name={path}: {why}") from error


def _is_no_report(record: logging.LogRecord) -> bool:
    """False of what `_check_filled` and `_check_tied` say in a sentence; tables of failed conversions say more."""
    said = record.getMessage()
    return not ("LOAD REPORT" in said and "CONVERSION" not in said or "we will NOT tie them" in said)


@contextmanager
def _without_report() -> Iterator[None]:
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _check_type(folder: Path, raw: dict[str, Any]) -> None:
    """UserError for a model type that neither transformers nor a family of ours runs; remote code is never run."""
    if not is_known(raw):
        known = ", ".join(family.title for family in every_family() if family.foreign)
        raise UserError(
            f"model.name={folder}: config.json has model_type={raw.get('model_type')!r}, which transformers does not "
            f"know and code in the folder is not run; of other models these are known: {known}"
        )


def _own_tensors(folder: Path, raw: dict[str, Any]) -> Stored | None:
    """The tensors that transformers would read; None where these are not safetensors, or quantised."""
    if raw.get("quantization_config") or raw.get("transformers_weights") or not is_own(folder):
        return None
    stored = Stored(folder)
    stored.check_dtypes(name for name in stored.names if name.endswith((".weight", "_proj")))
    return stored


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


class Gguf(Transformers):
    """A .gguf file, dequantised: its blocks can be neither trained nor saved."""

    name = "gguf"

    def holds(self, path: Path) -> bool:
        return path.is_file()

    def open(self, path: Path, raw: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
        from transformers import GgufConfig

        check_file(path)
        with _refusing(path, raw):
            options = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
            model, info = self.pretrained(path.parent, dtype, **options)
        _check_filled(path, info, None)
        _check_tied(path, model)
        return model


def check_file(path: Path) -> None:
    """UserError for a file that is no .gguf."""
    if path.suffix != ".gguf":
        raise UserError(f"model.name={path}: a file must be .gguf; for safetensors name the folder")
