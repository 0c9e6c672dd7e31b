"""Tokenise text, conversations, pairs or ids: into a dataset folder to map into memory, or straight into memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from unmask.data import checksums
from unmask.data import dataset as layout
from unmask.data.arrow import chosen_split
from unmask.data.beginnings import begin_with
from unmask.data.chat import read_template, special_texts, texts_of
from unmask.data.dataset import Dataset, File, Manifest, open_dataset
from unmask.data.encoding import Coder, batches
from unmask.data.reading import Reading
from unmask.data.records import Bad
from unmask.data.sources import find_files, is_dataset, read_files, read_records, size_of
from unmask.data.storage import Storage, Tally, store
from unmask.data.tokenizer import fingerprint, load_tokenizer, train_tokenizer
from unmask.data.workers import ordered
from unmask.errors import UserError, as_path, disk_refusal
from unmask.files import replace_folder, staged

Report = Callable[[int, int, int], None]


def prepare(
    source: str | Path | Iterable[str | Path],
    output: str | Path,
    tokenizer: Any,
    *,
    force: bool = False,
    report: Report | None = None,
    **options: Any,
) -> Manifest:
    """Write a dataset folder; it appears whole or not at all, and memory stays bounded.

    source: text, JSONL, Parquet, an array of ids, a Megatron pair or a dataset that `datasets` saved; a folder or a
    pattern such as "src/**/*.tex"; or several of these. tokenizer: one of transformers, its path, or None when every
    record gives ids. force: replace a dataset that is there. report(bytes read, bytes in all, documents) is called as
    it goes on. options: the fields of `Reading`, such as workers=8. Raises UserError for a bad record, unless skip_bad
    counts it in the manifest.
    """
    reading = Reading.parse(options, "prepare")
    target = as_path(output, "the dataset to write")
    _refuse_output(target, force)
    tokenizer = _loaded(tokenizer, reading)
    coder = Coder(tokenizer, reading)
    encoder = coder.encoder
    sources = [str(source)] if isinstance(source, str | Path) else [str(item) for item in source]
    files = find_files(sources)
    total = sum(map(size_of, files))

    def refuse(bad: Bad) -> None:
        if not reading.skip_bad:
            raise UserError(f"{bad}; fix it or use --skip-bad")

    def progress(read: int, documents: int) -> None:
        if report is not None:
            report(read, total, documents)

    with _appearing(target) as folder:
        with open(folder / layout.TOKENS, "wb") as tokens, open(folder / layout.SUPERVISED, "wb") as flags:
            storage = Storage(tokens, flags, encoder.dtype)
            with closing(ordered(coder, batches(read_files(files, reading)), reading.workers)) as coded:
                tally = store(coded, storage, refuse, progress)
        _refuse_result(storage, tally, reading, " and ".join(sources))
        if storage.supervised == storage.offsets[-1]:
            (folder / layout.SUPERVISED).unlink()
        np.save(folder / layout.OFFSETS, np.array(storage.offsets, np.int64))
        if tokenizer is not None:
            _save_tokenizer(tokenizer, folder / layout.TOKENIZER)
        manifest = Manifest(
            dtype=encoder.dtype,
            documents=len(storage.offsets) - 1,
            tokens=storage.offsets[-1],
            supervised=storage.supervised,
            bos=list(coder.begin),
            conversations=tally.conversations,
            vocabulary=encoder.vocabulary or storage.largest + 1,
            tokenizer_sha256=None if tokenizer is None else fingerprint(tokenizer),
            chat_template_sha256=coder.chat.sha256 if coder.chat is not None and tally.conversations else None,
            supervise=reading.supervise if tally.conversations else None,
            sources=[Path(name).name for name in sources],
            skipped=tally.skipped,
            examples=tally.examples,
            files=_files(folder),
        )
        (folder / layout.MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    progress(total, manifest.documents)
    return manifest


def source_tokenizer(source: str | Path, size: int, *, report: Report | None = None, **options: Any) -> Any:
    """A byte-level BPE of `size` tokens trained on the texts of a source, as `prepare` reads them.

    options: the fields of `Reading`; report: as of `prepare`. Of conversations it is the messages' contents that are
    learnt from; what a chat template writes round them (<|im_start|>) are special tokens, one each.
    """
    reading = Reading.parse(options, "prepare")
    files = find_files(source)
    total = sum(map(size_of, files))
    special = special_texts(read_template(reading.chat_template)) if reading.chat_template is not None else ()

    def texts() -> Iterator[str]:
        for number, item in enumerate(read_files(files, reading)):
            if report is not None and not isinstance(item, Bad):
                report(item.read, total, number)
            yield from texts_of(item, reading)

    with TemporaryDirectory() as folder:
        return train_tokenizer(texts(), size, folder, special)


def dataset_from(source: Any, tokenizer: Any = None, **options: Any) -> Dataset:
    """A dataset from whatever holds one: a Dataset, a path, or texts and records in memory.

    A path is a prepared dataset (mapped; it must fit the tokeniser) or anything that `prepare` takes (encoded into
    memory). In memory: a list of strings or of records, a datasets.Dataset, or anything that iterates over these.
    options: the fields of `Reading`.
    """
    if isinstance(source, Dataset):
        return source
    reading = Reading.parse(options, "dataset_from")
    if reading.skip_bad:
        raise UserError("skip_bad=True: bad records are left out, counted and named by `prepare`: use it first")
    if isinstance(source, str | Path):
        if is_dataset(Path(source)):
            return _opened(source, tokenizer, options)
        where, hint = str(source), "; fix it, or leave it out with `unmask prepare --skip-bad`"
        items = read_files(find_files(source), reading)
    else:
        where, hint = "training data", ""
        items = read_records(_records_in(source, reading.split), reading)

    def refuse(bad: Bad) -> None:
        raise UserError(f"{bad}{hint}")

    coder = Coder(_loaded(tokenizer, reading), reading)
    dtype = coder.encoder.dtype
    tokens, flags = BytesIO(), BytesIO()
    storage = Storage(tokens, flags, dtype)
    with closing(ordered(coder, batches(items), reading.workers)) as coded:
        tally = store(coded, storage, refuse)
    _refuse_result(storage, tally, reading, where)
    supervised = np.frombuffer(flags.getvalue(), np.uint8) if storage.supervised < storage.offsets[-1] else None
    dataset = Dataset(np.frombuffer(tokens.getvalue(), dtype), supervised, np.array(storage.offsets, np.int64))
    dataset.bos = coder.begin
    return dataset


def _records_in(source: Any, split: str | None) -> Iterable[Any]:
    """Records in memory, of one split where there are several."""
    if hasattr(source, "keys"):  # one record, or a datasets.DatasetDict
        if split is None:
            raise UserError(f"training data is a list of records or one split, not a mapping of {', '.join(source)}")
        return chosen_split(source, split, "training data")
    if split is not None:
        raise UserError(f"split={split} has no effect: the training data is not a mapping of splits")
    if not isinstance(source, Iterable):
        raise UserError(
            f"training data is a path, a dataset or a list of texts or records, not {type(source).__name__}"
        )
    return source


def _opened(path: str | Path, tokenizer: Any, options: dict[str, Any]) -> Dataset:
    if options:
        raise UserError(f"{path}: is prepared already, so {', '.join(options)} would have no effect: leave it out")
    return open_dataset(path, tokenizer)


def _loaded(tokenizer: Any, reading: Reading) -> Any:
    """A tokeniser, with the chat template that the reading names."""
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    return with_template(begin_with(tokenizer, reading.bos, "bos"), reading.chat_template)


def with_template(tokenizer: Any, file: str | None) -> Any:
    """The tokeniser, or a copy of it with the chat template of a file."""
    if file is None:
        return tokenizer
    template = read_template(file)
    if tokenizer is None:
        raise UserError(f"chat_template={file}: has no effect without a tokeniser")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def _refuse_result(storage: Storage, tally: Tally, reading: Reading, where: str) -> None:
    """Raise UserError for nothing at all, and for settings that met nothing to have an effect on."""
    if len(storage.offsets) == 1:
        raise UserError(f"{where}: no document in it" + (f" ({tally.skipped} skipped)" if tally.skipped else ""))
    if not tally.conversations:
        for name, given in (("supervise", reading.supervise != "all"), ("chat_template", reading.chat_template)):
            if given:
                raise UserError(f"{where}: {name}={getattr(reading, name)} has no effect: no record has messages")
    if reading.bos != "auto" and not tally.texts:
        raise UserError(f"{where}: bos={reading.bos} has no effect: no document is made from text, which alone has it")
    if not reading.eos and not tally.texts:
        raise UserError(f"{where}: eos=False has no effect: no document is made from text, which alone it closes")


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # what the library's Rust half raises on a full disk
        if refusal := disk_refusal(error):
            raise OSError(None, refusal, str(folder)) from error
        raise


def _refuse_output(target: Path, force: bool) -> None:
    if target.is_dir() and is_dataset(target):
        if not force:
            raise UserError(f"{target}: holds a dataset already; use --force to replace it, or name another folder")
    elif target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: exists and is not a dataset; name another folder")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder to write into that takes its place at the end; UserError for what the disk refuses."""
    target, folder = target.absolute(), None
    try:
        with staged(target) as folder:
            yield folder
            replace_folder(folder, target)
    except OSError as error:
        end = "" if folder is None else "; nothing is left there of it"
        raise UserError(f"{target}: cannot be written: {error.strerror or error}{end}") from None


def _files(folder: Path) -> dict[str, File]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): File(bytes=path.stat().st_size, sha256=checksums.sha256(path))
        for path in paths
    }
