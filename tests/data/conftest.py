"""A small byte-level tokeniser, trained once for all tests of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unmask.data import train_tokenizer
from unmask.demo.corpus import stdlib_files


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in stdlib_files()[0][:40]]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(texts, 1000, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Any:
    from unmask.data import load_tokenizer

    return load_tokenizer(tokenizer_path)
