"""What a family of checkpoints is: which are its own, the model that computes them, and how they were trained.

Most families publish a transformers model under other names: these say how config.json and tensors map onto it. Others
are transformers' own (`unmask.models.families.transformers`), with a forward of their own where `adapt` gives them one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from unmask.attention import NAME, register
from unmask.errors import UserError
from unmask.models.families import sound
from unmask.models.families.find import ORIGIN
from unmask.models.families.folder import checked, embedding, shapes
from unmask.models.families.layout import Part, atoms, check, rotary
from unmask.models.families.materialise import FolderSource, leave, without_values
from unmask.models.families.stored import Stored
from unmask.models.special import KINDS, read_generation

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Family:
    """A family of checkpoints. Subclasses say how they differ from the model of transformers that computes the same.

    name: in the registry; types, architectures: what `model_type` and `architectures` of its config.json say;
    mask_token_id: where its config names none; objective: what it was trained by, for sampling and evaluation;
    end_tokens: that end an answer beside the tokeniser's EOS; renames: (pattern, replacement) from transformers' names
    to the family's, applied in order; fused: its name of a tensor -> the names, after `renames`, of its rows' parts.
    """

    name: ClassVar[str]
    #: Its models, for the documentation and for messages.
    title: ClassVar[str] = ""
    types: ClassVar[tuple[str, ...]] = ()
    architectures: ClassVar[tuple[str, ...]] = ()
    #: Whether it has a layout of its own, which exports go back to.
    foreign: ClassVar[bool] = True
    #: Whether its models read a mask token.
    masked: ClassVar[bool] = True
    mask_token_id: ClassVar[int | None] = None
    #: The field of config.json that an objective takes its block size from, where the size is not the family's.
    sized_by: ClassVar[str] = ""
    objective: ClassVar[dict[str, Any]] = {}
    end_tokens: ClassVar[tuple[int, ...]] = ()
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    fused: ClassVar[dict[str, tuple[str, ...]]] = {}
    #: Other objectives that some of its models were trained by, where config.json does not tell.
    also: ClassVar[tuple[str, ...]] = ()
    #: The preset of `unmask sample --as` that decodes as its authors do.
    preset: ClassVar[str | None] = None
    #: Fields of transformers' configuration that config.json has by the same name; null ones keep their default.
    fields: ClassVar[tuple[str, ...]] = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
        "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias",
        "attention_dropout",
        "pad_token_id", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    #: Its name of the field that holds the rows of the embedding.
    vocabulary: ClassVar[str] = "vocab_size"

    # which checkpoints are its own, and their models

    def holds(self, path: Path) -> bool:
        """Whether a path without config.json holds one of its checkpoints."""
        return False

    def open(self, path: Path, raw: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
        """The model of a checkpoint; its attention is unmask's. raw: its config.json, {} for one that has none.

        Its weights are left to `unmask.models.families.materialise.fill`, or there. UserError: a field or a tensor that
        no module of transformers has, one that is missing, a shape that does not fit.
        """
        from transformers import AutoConfig

        stored, where = Stored(path), path / "config.json"
        try:
            check(raw)
            fields = dict.fromkeys(KINDS) | self.config(raw, stored.names)  # transformers' are of another tokeniser
        except KeyError as error:
            raise UserError(f"{where}: {self.name} has no {error} there") from None
        except UserError as error:
            raise UserError(f"model.name={path}: {error}") from None
        except Exception as error:  # a field of a type that it cannot have
            raise UserError(f"{where}: {self.name} cannot be read from it: {sound.one_line(error)}") from error
        try:
            with without_values():
                model = self.empty(AutoConfig.for_model(fields.pop("model_type"), **fields), dtype)
            read_generation(model, path)
            merged = any(name.endswith(".experts.down_proj") for name in stored.names)
            parts = list(self.parts(shapes(model), raw, merged))
        except Exception as error:  # whatever transformers raises for values that do not go together
            raise UserError(f"{where}: {self.name} cannot be built from it: {sound.one_line(error)}") from error
        recorded = checked(model, parts, stored, self)
        leave(model, FolderSource(parts, stored).read)
        mask = raw.get("mask_token_id")
        if mask is None and (usual := self.mask(raw)) is not None and usual < len(embedding(model)):
            mask = usual
        if mask is not None:
            model.config.mask_token_id = mask
        origin = {"family": self.name, "config": raw, "folder": str(path.absolute()), "merged": merged}
        setattr(model.config, ORIGIN, origin | recorded)
        return model

    def auto(self) -> Any:
        """The class of transformers that finds the class of a model."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def empty(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """A model whose weights are not yet written."""
        from transformers.initialization import no_init_weights

        register()
        with no_init_weights():
            model = self.auto().from_config(config, dtype=dtype, attn_implementation=NAME)
        model.tie_weights()
        return model

    def adapt(self, model: PreTrainedModel) -> None:
        """Make a model a decoder over rows, in place; nothing where it is one."""

    def config(self, raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """The fields of transformers' configuration, with `model_type`. raw: config.json; names: the stored tensors.

        UserError, naming it, for what no module of transformers computes.
        """
        raise NotImplementedError

    def sized(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Those fields of a configuration among which is the size of the vocabulary."""
        return fields

    def kept(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields that have the same name in both configurations and a value."""
        found = {name: raw[name] for name in self.fields if raw.get(name) is not None}
        return {"rope_parameters": rotary(raw)} | found

    # what is known of them

    def block_size(self, raw: dict[str, Any]) -> int | None:
        """The block size that config.json names, if any."""
        return None

    def mask(self, raw: dict[str, Any]) -> int | None:
        """The mask token of a model whose config.json names none."""
        return self.mask_token_id

    def check_text(self, model: PreTrainedModel, token: np.ndarray) -> None:
        """UserError for documents' tokens that its models cannot be trained on."""

    # its tensors

    def rename(self, ours: str, raw: dict[str, Any]) -> str:
        """transformers' name of a tensor, its experts one by one, in the family's own terms."""
        for pattern, replacement in self.renames:
            ours = re.sub(pattern, replacement, ours)
        return ours

    def optional(self, theirs: str) -> bool:
        """Whether a checkpoint may lack a tensor, which is then zero."""
        return False

    def parts(self, shapes: Mapping[str, tuple[int, ...]], raw: dict[str, Any], merged: bool) -> Iterator[Part]:
        """Every part of a model. shapes: of transformers' tensors by name, tied ones once; merged: its checkpoint
        holds the experts of a layer together, [experts, out, in] by projection."""
        row: dict[str, int] = {}
        owner = {part: whole for whole, parts in self.fused.items() for part in parts}
        for ours, shape in shapes.items():
            for name, at in atoms(ours, shape, merged):
                theirs = self.rename(name, raw)
                whole = next((key for key in owner if key in theirs), None)
                if whole is None:
                    yield Part(theirs, ours, at)
                    continue
                theirs = theirs.replace(whole, owner[whole])
                first = row.get(theirs, 0)
                row[theirs] = first + shape[0]
                yield Part(theirs, ours, at, (first, first + shape[0]))
