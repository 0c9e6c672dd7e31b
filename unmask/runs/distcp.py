"""Reading the tensors of a checkpoint (torch DCP: `.metadata` and *.distcp) of which nothing is trusted.

DCP keeps its table of contents as a pickle, and values that are no tensor (settings of the optimiser) too; as
DCP reads them, both may call any function. Here a class that the table names becomes a `_Record` without behaviour;
from these DCP's own classes are made again once every field has been looked at. Values are read with weights_only.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from unmask.engine.state import weights
from unmask.errors import UserError

TABLE = ".metadata"
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
#: What a table of contents names beside dtypes and torch.Size, each of which is read as a record.
NAMES = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((_METADATA, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
        (_METADATA, "TensorProperties"),
        (_FILES, "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    }
)


class Contents(NamedTuple):
    """What a checkpoint holds. names: of its entries, `model.lm_head.weight`; the folder's metadata, made anew."""

    names: frozenset[str]
    metadata: Metadata


def contents(folder: Path) -> Contents:
    """The table of contents of a checkpoint; UserError where it is damaged, or names anything but DCP's own classes."""
    path = folder / TABLE
    try:
        written = path.read_bytes()
        for code, index, _ in pickletools.genops(written):  # a memo has room up to its largest index, before it is full
            if "PUT" in code.name and index is not None and index > len(written):
                raise UserError(f"keeps a value under the number {index}")
        metadata = _metadata(_Unpickler(io.BytesIO(written)).load())
    except UserError as error:
        raise UserError(f"{path}: {error}: it was not written by unmask, and is not read") from None
    except Exception as error:  # whatever pickle raises for bytes that are none
        raise UserError(
            f"{path}: not the table of contents of a checkpoint ({type(error).__name__}); take another checkpoint"
        ) from None
    return Contents(frozenset(metadata.state_dict_metadata), metadata)


def load(state: dict[str, Any], folder: Path, table: Contents | None = None) -> None:
    """Fill the tensors of `state` in place from a checkpoint, and replace its other values.

    table: the folder's contents, if they have been read. UserError where they do not fit, or cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    reader = _Reader(folder, (table or contents(folder)).metadata)
    try:
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:
        # DCP's own message holds the traceback of every rank's failure, of which here there is one.
        reason = next(iter(error.failures.values()))[0]
        if not isinstance(reason, Exception) or isinstance(reason, UserError | torch.OutOfMemoryError):
            raise reason from None
        line = next((line.strip() for line in str(reason).splitlines() if line.strip()), "")
        raise UserError(
            f"{folder}: its tensors cannot be read ({type(reason).__name__}: {line[:200]}); take another checkpoint"
        ) from error


class _Record:
    """An instance of a class that a pickle names: what it was called with, and its state, as data."""

    kind = ""

    def __init__(self, *given: Any):
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Knows the classes of NAMES, as records of its own that a pickle may alter at will."""

    def __init__(self, file: Any):
        super().__init__(file)
        self.kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and "." not in name and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) not in NAMES:
            raise UserError(f"names {module}.{name}, which could run code")
        return self.kinds.setdefault(name, type(name, (_Record,), {"kind": name}))

    def persistent_load(self, pid: Any) -> Any:
        raise UserError("names something outside itself")


def _metadata(found: Any) -> Metadata:
    """DCP's metadata from a record of it; UserError or TypeError for a field of another type."""
    fields = _fields(found, "Metadata")
    version = fields.get("version")
    return Metadata(
        state_dict_metadata={_is(name, str): _entry(entry) for name, entry in fields["state_dict_metadata"].items()},
        planner_data={_is(name, str): _path(path) for name, path in (fields.get("planner_data") or {}).items()},
        storage_data={_index(key): _place(value) for key, value in fields["storage_data"].items()},
        storage_meta=StorageMeta(),
        version=None if version is None else _is(version, str),
    )


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind:
        raise TypeError(f"not a {kind}")
    return _is(getattr(record, "state", {}), dict)


def _is(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"not a {kind.__name__}")
    return value


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if getattr(entry, "kind", None) == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    properties = fields["properties"]
    if not isinstance(properties, _Record) or properties.kind != "TensorProperties":
        raise TypeError("not TensorProperties")
    dtype, _, gradient = _is(properties.state, tuple)[:3]
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _is(fields["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=_is(dtype, torch.dtype), requires_grad=_is(gradient, bool)),
        _is(fields["size"], torch.Size),
        [ChunkStorageMetadata(_is(chunk["offsets"], torch.Size), _is(chunk["sizes"], torch.Size)) for chunk in chunks],
    )


def _path(path: Any) -> tuple[str | int, ...]:
    """Where an entry stands in the state that was saved."""
    if not all(type(step) in (str, int) for step in _is(path, tuple)):
        raise TypeError("not a path of keys")
    return tuple(path)


def _index(key: Any) -> MetadataIndex:
    fields = _fields(key, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _is(fields["fqn"], str),
        None if offset is None else _is(offset, torch.Size),
        None if index is None else _is(index, int),
    )


def _place(value: Any) -> _StorageInfo:
    """Where an entry lies: a file of the folder itself, and nothing that would have to be unpacked."""
    fields = _fields(value, "_StorageInfo")
    name = _is(fields["relative_path"], str)
    if PurePath(name).name != name:
        raise UserError(f"names a file outside the folder ({name})")
    if fields.get("transform_descriptors"):
        raise UserError("names a transformation of its files")
    return _StorageInfo(name, _is(fields["offset"], int), _is(fields["length"], int))


class _Reader(FileSystemReader):
    """DCP's reader with a table of contents that has been looked at; tensors it reads with weights_only."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _Planner(DefaultLoadPlanner):
    """DCP's planner, which takes plain values (numbers, text, lists of them) where DCP takes any object."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        from torch.distributed.checkpoint._traverse import set_element

        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:
            raise UserError(
                f"{name} in the checkpoint is no plain value, and is not read ({type(error).__name__}); "
                f"take another checkpoint"
            ) from None
        set_element(self.original_state_dict, self.mappings[name], found)


# DCP without a process group warns that it saves and loads in one process, which is what we ask for. Once, and not in
# a `catch_warnings`: that is no thread's own, and checkpoints may be written in one.
warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Read the model's tensors, and nothing else, from a verified checkpoint folder."""
    load({"model": weights(model)}, folder)


@torch.no_grad()
def load_average(model: torch.nn.Module, folder: Path) -> None:
    """Put the EMA weights of a verified checkpoint in place of the model's; UserError where it holds none."""
    saved = contents(folder)
    live = {name: parameter for name, parameter in model.named_parameters() if f"ema.{name}" in saved.names}
    if not live:
        raise UserError(f"{folder}: holds no EMA weights: the run was trained with training.ema=0")
    wide = {name: torch.promote_types(parameter.dtype, torch.float32) for name, parameter in live.items()}
    average = {name: torch.empty_like(parameter, dtype=wide[name]) for name, parameter in live.items()}
    load({"ema": average}, folder, saved)
    for name, parameter in live.items():
        parameter.copy_(average[name])
