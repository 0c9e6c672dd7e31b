"""Tokenisers: training a byte-level BPE, loading one from disk, and telling two apart.

Byte-level BPE (Sennrich et al. 1508.07909 over bytes, as GPT-2 does) has no unknown token: every text round-trips.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UserError
from unmask.hf import fetching, open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
SMALLEST = 256 + 3  # every byte and the three special tokens
#: And the most that is asked for by anybody: the trainer takes memory for all of them first.
LARGEST = 1 << 22


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str | Path, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` tokens and save it as a folder that transformers' AutoTokenizer opens.

    Its end, mask and pad tokens have the ids 0, 1 and 2; `special`: further special tokens, which have the next ones.
    Little text gives fewer tokens than asked for.
    """
    more = [text for text in dict.fromkeys(special) if text not in (END, MASK, PAD)]
    if vocab_size < SMALLEST + len(more):
        raise UserError(
            f"vocab_size={vocab_size}: a byte-level vocabulary has at least {SMALLEST + len(more)} tokens"
            + (f", {len(more)} special ones of the chat template among them" if more else "")
        )
    if vocab_size > LARGEST:
        raise UserError(f"vocab_size={vocab_size}: a vocabulary has at most {LARGEST:,} tokens")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK, PAD, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _ending_on_a_signal(texts) as watched:
        model.train_from_iterator(watched, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END, mask_token=MASK, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    if more:
        tokenizer.add_special_tokens({"extra_special_tokens": more})
    tokenizer.save_pretrained(str(path))
    return tokenizer


@contextmanager
def _ending_on_a_signal(texts: Iterable[str]) -> Iterator[Iterator[str]]:
    """`texts`, which end when SIGTERM or Ctrl-C comes.

    The library reads them in threads of its own, and Python handles a signal in the main one, which waits for these.
    """
    if threading.current_thread() is not threading.main_thread():
        yield iter(texts)
        return
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    before, ended = signal.set_wakeup_fd(write, warn_on_full_buffer=False), False

    def goes_on(text: str) -> bool:
        nonlocal ended
        try:
            ended = ended or not {signal.SIGTERM, signal.SIGINT}.isdisjoint(os.read(read, 64))
        except BlockingIOError:  # no signal
            return True
        return not ended

    try:
        yield takewhile(goes_on, texts)
        if ended:  # and its handler did not raise
            raise KeyboardInterrupt
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokeniser of a folder, a `tokenizer.json` or a `.gguf` file, a prepared dataset, a run or one of its steps.

    From this disk only.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path}: no such tokeniser; give a folder with tokenizer.json, that file, a .gguf file, a prepared "
            f"dataset or a run{fetching(path)}"
        )
    path = _inside(path)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if path.is_dir():
            return open_tokenizer(path)
        if path.suffix == ".gguf":
            options = {"local_files_only": True, "trust_remote_code": False}
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **options)
        if (path.parent / "tokenizer_config.json").exists():
            return open_tokenizer(path.parent)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # whatever a malformed file makes these libraries raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: holds no tokeniser that transformers can open: {reason}") from error


def _inside(path: Path) -> Path:
    """Where the tokeniser lies in a prepared dataset, a step of a run, or a run, whose newest it is."""
    if any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return path
    steps = [folder for folder in path.glob("step-*/hf") if folder.parent.name.removeprefix("step-").isdecimal()]
    steps.sort(key=lambda folder: int(folder.parent.name.removeprefix("step-")), reverse=True)
    return next((folder for folder in (path / "tokenizer", path / "hf", *steps) if folder.is_dir()), path)


def fingerprint(tokenizer: Any) -> str:
    """sha256 of the vocabulary with its ids, added tokens included."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        digest.update(f"{index} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def refuse_other(prepared: Any, given: Any, where: str) -> None:
    """Raise UserError unless every token of `prepared` has the same id in `given`, which may have more tokens."""
    vocabulary = given.get_vocab()
    for token, index in prepared.get_vocab().items():
        if vocabulary.get(token) != index:
            other = vocabulary.get(token, "unknown")
            raise UserError(
                f"{where}: prepared with another tokeniser: token {token!r} is {index} there and {other} in the one "
                "given; prepare the data again with this tokeniser"
            )
