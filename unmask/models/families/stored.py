"""The tensors of a folder of safetensors. A file is mapped, not read, and opened one at a time.

Which files count is transformers' own order: model.safetensors, else those that model.safetensors.index.json names.
Others may lie beside; they are read, all of them, only where a folder has neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.files import read_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The dtypes of weights, by safetensors' terms.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_own(folder: Path) -> bool:
    """Whether transformers finds safetensors in a folder."""
    return (folder / WHOLE).is_file() or (folder / INDEX).is_file()


class Stored:
    """The tensors of a folder of safetensors, by name; files are opened one at a time.

    dtype, shape: of each, the dtype in safetensors' terms. UserError: a file that is none or has gone, an index that
    does not fit the files, a tensor that is stored twice.
    """

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.file: dict[str, Path] = {}
        self.dtype: dict[str, str] = {}
        self.shape: dict[str, list[int]] = {}
        self._opened: tuple[Path, Any] | None = None
        self._state: dict[Path, tuple[int, int, int]] = {}
        index: dict[str, str] = {}
        if (folder / WHOLE).is_file():
            paths = [folder / WHOLE]
        elif (folder / INDEX).exists():
            index = read_index(folder / INDEX)
            paths = [folder / name for name in dict.fromkeys(index.values())]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        for path in paths:
            if not path.is_file():
                what = "it is a folder" if path.exists() else "it is missing"
                raise UserError(f"{path}: the index names this file, and {what}")
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():
                        if name in self.file:
                            raise UserError(f"{path}: holds {name}, as {self.file[name].name} does; remove one of them")
                        header = file.get_slice(name)
                        self.file[name], self.dtype[name] = path, header.get_dtype()
                        self.shape[name] = header.get_shape()
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: not a safetensors file ({error}); fetch it again") from None
            self._state[path] = _state(path)
        for name, where in index.items():
            if self.file.get(name) != folder / where:
                raise UserError(f"{folder / INDEX}: {where} holds no {name}; fetch both again")
        if not self.file:
            raise UserError(f"model.name={folder}: holds no safetensors file; convert its weights to safetensors first")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.file)

    def check_dtypes(self, names: Iterable[str]) -> None:
        """UserError for one of these that is no floating-point tensor, or one of eight bits."""
        for name in names:
            if self.dtype[name] not in FLOATS:
                *others, last = FLOATS
                known = f"{', '.join(others)} or {last}"
                raise UserError(f"{self.file[name]}: {name} is stored as {self.dtype[name]}; store it as {known}")

    def check_unchanged(self) -> None:
        """UserError for a file that is not the one that was opened."""
        for path, state in self._state.items():
            if not path.is_file():
                raise UserError(f"{path}: has gone while the model was loaded; fetch it again")
            if _state(path) != state:
                raise UserError(f"{path}: was changed while the model was loaded; start again")

    def piece(self, name: str, at: list[slice]) -> Tensor:
        """A slice of one tensor, of a whole one no copy; its file stays open until another one is asked for."""
        from safetensors import safe_open

        path = self.file[name]
        if self._opened is None or self._opened[0] != path:
            self._opened = path, safe_open(path, "pt")
        if all(within.indices(size) == (0, size, 1) for within, size in zip(at, self.shape[name], strict=False)):
            return self._opened[1].get_tensor(name)
        return self._opened[1].get_slice(name)[tuple(at)]

    def close(self) -> None:
        self._opened = None


def _state(path: Path) -> tuple[int, int, int]:
    known = path.stat()
    return known.st_ino, known.st_size, known.st_mtime_ns


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> file."""
    again = "fetch it again"
    table = read_json(path, again).get("weight_map")
    if table is None:
        raise UserError(f"{path}: not an index of weights: it has no weight_map; {again}")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise UserError(f"{path}: not an index of weights: weight_map gives no file by tensor; {again}")
    for name in table.values():
        if PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise UserError(f"{path}: names {name}, which is no file of this folder; {again}")
    return table
