"""Foreign folders: what is recorded of one as it is opened, so that it can be written back as it came.

What a folder was like is kept in the model's config, as `origin`: its family and config.json, whether its experts were
merged, which tensors it lacked and which had a dtype of their own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.models.families.find import family_of_model, origin_of
from unmask.models.families.layout import Part
from unmask.models.families.stored import FLOATS, Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.models.families.base import Family

#: Tensors of a checkpoint that follow from its config.
DERIVED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.cos_cached|rotary_emb\.sin_cached)")
#: Rows of an embedding that are compared at a time.
ROWS = 4096
#: Bytes of a shard that is written; a tensor that is larger has one of its own.
SHARD = 5_000_000_000
#: Files of a folder, beside weights, config and tokeniser, that belong to its layout.
BESIDE = ("*.py", "generation_config.json")


def checked(model: PreTrainedModel, parts: list[Part], stored: Stored, family: Family) -> dict[str, Any]:
    """What an origin records of a folder whose every tensor has its places in a model; nothing is copied.

    absent: optional tensors that are not there; head: the name of a head that is stored although it is the embedding;
    dtypes: those that are not the usual one, by name. UserError for a tensor that is missing, has no place, or does not
    fit.
    """
    ours, where = tensors(model), defaultdict(list)
    for part in parts:
        where[part.theirs].append(part)
    missing = [name for name in where if name not in stored.names]
    absent = [name for name in missing if family.optional(name)]
    if required := sorted(set(missing) - set(absent)):
        more = f" and {len(required) - 1} more" if len(required) > 1 else ""
        raise UserError(f"model.name={stored.folder}: the checkpoint holds no {required[0]}{more}")
    stored.check_dtypes(name for name, parts in where.items() if name in stored.names and _floats(parts, ours))
    head = family.rename("lm_head.weight", {}) if model.config.tie_word_embeddings else None
    dtypes: dict[str, torch.dtype] = {}
    for name, file in stored.file.items():
        if name == head:
            continue
        if name in where:
            _check_shape(stored, name, where[name], ours)
            wide, dtype = ours[where[name][0].ours].dtype, FLOATS.get(stored.dtype[name])
            dtypes[name] = wide if dtype is None or torch.promote_types(wide, dtype) != wide else dtype
        elif not DERIVED.fullmatch(name):
            raise UserError(
                f"{file}: holds {name}, for which {type(model).__name__}, as which {family.name} is run, has no place"
            )
    head = head if head in stored.names else None
    if head is not None and not _is_embedding(model, parts, stored, head):
        raise UserError(
            f"model.name={stored.folder}: config.json ties the head to the embedding, and {head} is another "
            f"tensor; say in config.json that they are not tied"
        )
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    own = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype != usual}
    return {"absent": absent, "head": head, "dtypes": own}


def _floats(parts: list[Part], ours: dict[str, Tensor]) -> bool:
    return all(ours[part.ours].is_floating_point() for part in parts)


def _check_shape(stored: Stored, name: str, parts: list[Part], ours: dict[str, Tensor]) -> None:
    """UserError unless the parts of a stored tensor have the shapes of their places."""
    shape = stored.shape[name]
    for part in parts:
        piece = shape
        if part.rows is not None and shape:
            piece = [len(range(*slice(*part.rows).indices(shape[0]))), *shape[1:]]
        if list(ours[part.ours][part.at].shape) != piece:
            wanted = shape_of(parts, ours)
            raise UserError(f"{stored.file[name]}: {name} has the shape {shape}, config.json says {wanted}")


def _is_embedding(model: PreTrainedModel, parts: list[Part], stored: Stored, head: str) -> bool:
    """Whether a stored head holds the values of the stored embedding, in the model's dtype."""
    weight = embedding(model)
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    theirs = next(part.theirs for part in parts if part.ours == name)
    if stored.shape[head] != stored.shape[theirs]:
        return False
    rows = [[slice(first, first + ROWS)] for first in range(0, len(weight), ROWS)]
    values = ((stored.piece(each, at).to(weight.dtype) for each in (head, theirs)) for at in rows)
    same = all(torch.equal(*pair) for pair in values)
    stored.close()
    return same


def write_folder(model: PreTrainedModel, folder: Path, shard: int = SHARD) -> dict[str, Any]:
    """Write a model with an origin as the folder that it came from: names, layout and dtypes of its tensors.

    Returns its config.json, with sizes and the mask token as they are now, which is not yet written. shard: bytes.
    """
    origin = origin_of(model)
    if origin is None:
        raise UserError("format=family writes the layout a model came from, and this one is transformers' own: use hf")
    family, raw, ours = family_of_model(model), dict(origin["config"]), tensors(model)
    where: dict[str, list[Part]] = defaultdict(list)
    for part in family.parts(shapes(model), raw, origin["merged"]):
        where[part.theirs].append(part)
    for name in origin["absent"]:
        if all(not ours[part.ours][part.at].any() for part in where[name]):
            del where[name]
    if origin["head"]:
        embedded = next(name for name, each in ours.items() if each.data_ptr() == embedding(model).data_ptr())
        where[origin["head"]] = [Part(origin["head"], embedded, (slice(None),))]
    usual = embedding(model).dtype
    dtype = {name: getattr(torch, origin["dtypes"].get(name, ""), usual) for name in where}
    bytes_of = {name: _elements(where[name], ours) * dtype[name].itemsize for name in where}
    _save(folder, where, ours, dtype, list(_groups(bytes_of, shard)))
    rows = len(embedding(model))
    raw[family.vocabulary if raw.get(family.vocabulary) is not None else "vocab_size"] = rows
    mask = getattr(model.config, "mask_token_id", None)
    if mask not in (None, raw.get("mask_token_id"), family.mask(raw)):
        raw["mask_token_id"] = mask
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    if key in raw or usual != torch.float32:
        raw[key] = str(usual).removeprefix("torch.")
    source = Path(origin["folder"])
    for glob in BESIDE:
        for path in source.glob(glob):
            shutil.copyfile(path, folder / path.name)
    return raw


@torch.no_grad()
def _save(
    folder: Path, where: dict[str, list[Part]], ours: dict[str, Tensor], dtype: dict[str, torch.dtype],
    groups: list[list[str]],
) -> None:  # fmt: skip
    from safetensors.torch import save_file

    table: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        shard = {}
        for name in names:
            pieces = [ours[part.ours][part.at].detach() for part in where[name]]
            whole = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to("cpu", dtype[name])
            # An expert shares the memory of its stack and a tied head the embedding's, which safetensors refuses.
            shard[name] = whole.clone(memory_format=torch.contiguous_format) if where[name][0].at else whole
        save_file(shard, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(_elements(where[name], ours) * dtype[name].itemsize for name in table)
        index = {"metadata": {"total_size": total}, "weight_map": table}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _groups(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > limit:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _elements(parts: list[Part], ours: dict[str, Tensor]) -> int:
    return sum(ours[part.ours][part.at].numel() for part in parts)


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: tied tensors once, persistent buffers."""
    names, stored = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}, model.state_dict()
    return {name: tensor for name, tensor in stored.items() if name in names}


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors(model).items()}


def embedding(model: PreTrainedModel) -> Tensor:
    return model.get_input_embeddings().weight


def shape_of(parts: list[Part], ours: dict[str, Tensor]) -> list[int]:
    first = list(ours[parts[0].ours][parts[0].at].shape)
    return first if parts[0].rows is None else [max(part.rows[1] for part in parts if part.rows), *first[1:]]
