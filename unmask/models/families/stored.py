"""The tensors of a folder of safetensors. A file is mapped, not read, and opened one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from unmask.errors import UserError


class Stored:
    """The tensors of a folder of safetensors, by name; files are opened one at a time."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.file: dict[str, Path] = {}
        self._opened: tuple[Path, Any] | None = None
        index = folder / "model.safetensors.index.json"
        paths = sorted(folder.glob("*.safetensors"))
        if index.exists():
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = [folder / name for name in dict.fromkeys(table.values())]
        for path in paths:
            if not path.exists():
                raise UserError(f"{path}: the index names this file, and it is missing")
            try:
                with safe_open(path, "pt") as file:
                    self.file |= dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise UserError(f"{path}: not a safetensors file ({error}); fetch it again") from None
        if not self.file:
            raise UserError(f"model.name={folder}: holds no safetensors file; convert its weights to safetensors first")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.file)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, file by file."""
        from safetensors import safe_open

        for path in dict.fromkeys(self.file.values()):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)

    def piece(self, name: str, at: list[slice]) -> Tensor:
        """A slice of one tensor; its file stays open until another one is asked for."""
        from safetensors import safe_open

        path = self.file[name]
        if self._opened is None or self._opened[0] != path:
            self._opened = path, safe_open(path, "pt")
        return self._opened[1].get_slice(name)[tuple(at)]

    @property
    def folder(self) -> Path:
        return next(iter(self.file.values())).parent
