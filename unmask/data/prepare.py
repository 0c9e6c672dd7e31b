"""Tokenise text, pairs or ids: into a dataset folder that can be mapped into memory, or straight into memory."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from unmask.data import dataset as layout
from unmask.data.dataset import Dataset, File, Manifest, open_dataset
from unmask.data.encoding import Encoder, Storage, store
from unmask.data.sources import Bad, Piece, find_files, is_dataset, read_files, read_records
from unmask.data.tokenizer import fingerprint, load_tokenizer, train_tokenizer
from unmask.errors import UserError, as_path

Report = Callable[[int, int, int], None]


def prepare(
    source: str | Path | Iterable[str | Path],
    output: str | Path,
    tokenizer: Any,
    *,
    eos: bool = True,
    skip_bad: bool = False,
    force: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Write a dataset folder; it appears whole or not at all, and memory stays bounded.

    source: a text file, JSONL, a folder, a pattern such as "src/**/*.tex", or several of these.
    tokenizer: one of transformers, its path, or None when every record gives `input_ids`.
    eos: close documents made from text with the tokeniser's end token. force: replace a dataset that is there.
    report(bytes read, bytes in all, documents) is called as it goes on. Raises UserError for a bad record, unless
    skip_bad counts it in the manifest.
    """
    target = as_path(output, "the dataset to write")
    _refuse_output(target, force)
    tokenizer = _loaded(tokenizer)
    encoder = Encoder(tokenizer, eos)
    sources = [str(source)] if isinstance(source, str | Path) else [str(item) for item in source]
    files = find_files(sources)
    total = sum(file.stat().st_size for file in files)

    def refuse(bad: Bad) -> None:
        if not skip_bad:
            raise UserError(f"{bad}; fix it or use --skip-bad")

    def progress(read: int, documents: int) -> None:
        if report is not None:
            report(read, total, documents)

    with _appearing(target) as folder:
        with open(folder / layout.TOKENS, "wb") as tokens, open(folder / layout.SUPERVISED, "wb") as flags:
            storage = Storage(tokens, flags, encoder.dtype)
            tally = store(read_files(files), encoder, storage, refuse, progress)
        if len(storage.offsets) == 1:
            raise UserError(f"{' and '.join(sources)}: no document in it ({tally.skipped} skipped)")
        if storage.supervised == storage.offsets[-1]:
            (folder / layout.SUPERVISED).unlink()
        np.save(folder / layout.OFFSETS, np.array(storage.offsets, np.int64))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder / layout.TOKENIZER))
        manifest = Manifest(
            dtype=encoder.dtype,
            documents=len(storage.offsets) - 1,
            tokens=storage.offsets[-1],
            supervised=storage.supervised,
            vocabulary=encoder.vocabulary or storage.largest + 1,
            tokenizer_sha256=None if tokenizer is None else fingerprint(tokenizer),
            sources=[Path(name).name for name in sources],
            skipped=tally.skipped,
            examples=tally.examples,
            files=_files(folder),
        )
        (folder / layout.MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    progress(total, manifest.documents)
    return manifest


def source_tokenizer(source: str | Path, size: int) -> Any:
    """A byte-level BPE of `size` tokens trained on the texts of a source, as `prepare` reads them."""
    pieces = read_files(find_files(source))
    texts = (piece.content for piece in pieces if isinstance(piece, Piece) and isinstance(piece.content, str))
    with TemporaryDirectory() as folder:
        return train_tokenizer(texts, size, folder)


def dataset_from(source: Any, tokenizer: Any = None, *, eos: bool = True) -> Dataset:
    """A dataset from whatever holds one: a Dataset, a path, or texts and records in memory.

    A path is a prepared dataset (mapped; it must fit the tokeniser) or text as `prepare` takes it (encoded into
    memory). In memory: a list of strings or of records, a datasets.Dataset, or anything that iterates over these.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, str | Path):
        if is_dataset(Path(source)):
            return open_dataset(source, tokenizer)
        items, hint = read_files(find_files(source)), "; fix it, or leave it out with `unmask prepare --skip-bad`"
    elif hasattr(source, "keys"):  # one record, or a datasets.DatasetDict
        raise UserError(f"training data is a list of records or one split, not a mapping of {', '.join(source)}")
    elif isinstance(source, Iterable):
        items, hint = read_records(source), ""
    else:
        raise UserError(
            f"training data is a path, a dataset or a list of texts or records, not {type(source).__name__}"
        )

    def refuse(bad: Bad) -> None:
        raise UserError(f"{bad}{hint}")

    encoder = Encoder(_loaded(tokenizer), eos)
    tokens, flags = BytesIO(), BytesIO()
    storage = Storage(tokens, flags, encoder.dtype)
    store(items, encoder, storage, refuse)
    if len(storage.offsets) == 1:
        raise UserError(f"{source if isinstance(source, str | Path) else 'training data'}: no document in it")
    supervised = np.frombuffer(flags.getvalue(), np.uint8) if storage.supervised < storage.offsets[-1] else None
    return Dataset(np.frombuffer(tokens.getvalue(), encoder.dtype), supervised, np.array(storage.offsets, np.int64))


def _loaded(tokenizer: Any) -> Any:
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def _refuse_output(target: Path, force: bool) -> None:
    if target.is_dir() and is_dataset(target):
        if not force:
            raise UserError(f"{target}: holds a dataset already; use --force to replace it, or name another folder")
    elif target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: exists and is not a dataset; name another folder")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder beside the target to write into: moved into its place at the end, removed on any failure."""
    target = target.absolute()
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    replaced = folder.with_suffix(".replaced")
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{target}: cannot be written: {error.strerror}") from None
        yield folder
        if target.exists():
            target.rename(replaced)
        folder.rename(target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        for left in (folder, replaced):
            shutil.rmtree(left, ignore_errors=True)


def _files(folder: Path) -> dict[str, File]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): File(bytes=path.stat().st_size, sha256=layout.sha256(path))
        for path in paths
    }
