"""Data: how full packs are, how fast text is tokenised, how fast a dataset opens, what of a step goes into loading.

The corpus is the source of the running Python's standard library, repeated, as JSONL; the tokeniser a byte-level BPE of
8,192 tokens trained on it. Tokenising is `prepare` from file to folder, the start of its processes and the checksums
included, against `tokenizers` alone in as many processes: `encode_batch` on texts that are in memory already. The two
take turns.

    python benchmarks/data.py [--json] [--rounds 3] [--only fill mixing tokenising opening loading]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, Measure, run_cases

PROCESSES, REPEATS, BATCH = 2, 3, 1024
PACK = 4096


def library_texts() -> list[str]:
    """The training files of the standard library."""
    from unmask.demo.corpus import stdlib_files

    return [path.read_text(encoding="utf-8", errors="replace") for path in stdlib_files()[0]]


@cache
def tokenizer() -> Any:
    from unmask.data import train_tokenizer

    with TemporaryDirectory() as folder:
        return train_tokenizer(library_texts(), 8192, folder)


def packs(lengths: Any) -> Any:
    """Packs of documents of these lengths."""
    import numpy as np

    from unmask.data import Dataset, Packs

    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    return Packs(Dataset(np.zeros(offsets[-1], np.uint16), None, offsets), PACK)


def fill(rounds: int) -> Iterator[Figure]:
    import numpy as np

    from unmask.data import dataset_from

    drawn = np.random.default_rng(0).lognormal(np.log(600), 1.0, 20_000).astype(int) + 1
    start = time.perf_counter()
    mixed = packs(drawn)
    seconds = time.perf_counter() - start
    yield Figure(f"fill at {PACK}: lognormal lengths, median 600", mixed.fill, 0.98, ">=")
    yield Figure("seconds to pack 20,000 documents", seconds, 0.1, "<=")
    library = packs(dataset_from(library_texts(), tokenizer()).lengths)
    yield Figure(f"fill at {PACK}: the standard library", library.fill, 0.98, ">=")
    many = np.random.default_rng(0).lognormal(np.log(600), 1.0, 1_000_000).astype(int) + 1
    start = time.perf_counter()
    packs(many)
    yield Figure("seconds to pack 1,000,000 documents", time.perf_counter() - start, 5.0, "<=")


def mixing(rounds: int) -> list[Figure]:
    """Shares of tokens after 10,000 packs of three sources of unlike fill, against their weights."""
    import numpy as np

    from unmask.data import Mixture, Source

    weights = (0.7, 0.2, 0.1)
    generator = np.random.default_rng(0)
    lengths = [generator.lognormal(np.log(median), 0.5, 20_000).astype(int) + 1 for median in (300, 1500, 3000)]
    mixed = Mixture([Source(str(w), packs(own), w) for w, own in zip(weights, lengths, strict=True)])
    tokens = np.zeros(len(weights))
    for place in range(10_000):
        number, pack = mixed.pack(place, 0)
        tokens[number] += sum(map(len, pack))
    error = float(np.abs(tokens / tokens.sum() - np.array(weights)).max())
    return [Figure("largest error of a source's share of tokens after 10,000 packs", error, 0.002, "<=")]


def raw(pipe: Any, saved: str, path: str, part: int) -> None:
    """In a process of its own: encode every PROCESSES-th batch of a file's texts, each time it is told to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(saved)
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    mine = [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)][part::PROCESSES]
    pipe.send(sum(len(text.encode()) for text in texts))
    while pipe.recv():
        start = time.perf_counter()
        for batch in mine:
            backend.encode_batch(batch, add_special_tokens=False)
        pipe.send(time.perf_counter() - start)


def tokenising(rounds: int) -> list[Figure]:
    from unmask.data import prepare

    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        # Documents of a page or so, as texts of the web are.
        parts = [text[at : at + 4000] for text in library_texts() for at in range(0, len(text), 4000)]
        with path.open("w", encoding="utf-8") as file:
            for _ in range(REPEATS):
                file.writelines(json.dumps({"text": part}) + "\n" for part in parts if part.strip())
        pipes, workers = [], []
        for part in range(PROCESSES):
            ours, theirs = context.Pipe()
            arguments = (theirs, tokenizer().backend_tokenizer.to_str(), str(path), part)
            workers.append(context.Process(target=raw, args=arguments, daemon=True))
            workers[-1].start()
            pipes.append(ours)
        size = [pipe.recv() for pipe in pipes][0]
        alone, whole = [], []
        for number in range(rounds + 1):
            for pipe in pipes:
                pipe.send(True)
            alone.append(max(pipe.recv() for pipe in pipes))
            start = time.perf_counter()
            prepare(path, Path(folder) / f"out{number}", tokenizer(), workers=PROCESSES)
            whole.append(time.perf_counter() - start)
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.send(False)
            worker.join()
    ratios = [a / w for a, w in zip(alone[1:], whole[1:], strict=True)]
    return [
        Figure(f"{PROCESSES} processes: prepare over encode_batch", statistics.median(ratios), 0.9, ">="),
        Figure("MB/s of text", size / 1e6 / statistics.median(whole[1:]), 1.0, ">="),
    ]


def ten_million(folder: Path) -> Path:
    """A prepared dataset of ten million tokens in documents of 500 on average."""
    import numpy as np

    from unmask.data import prepare

    generator = np.random.default_rng(0)
    token = generator.integers(3, 8192, 10_000_000).astype(np.uint16)
    token[generator.choice(len(token), 20_000, replace=False)] = 0
    np.save(folder / "ids.npy", token)
    prepare(folder / "ids.npy", folder / "dataset", tokenizer(), end_id=0)
    return folder / "dataset"


def opening(rounds: int) -> list[Figure]:
    from unmask.data import Packs, Sampler, open_dataset

    opened, ready = [], []
    with TemporaryDirectory() as folder:
        path = ten_million(Path(folder))
        for _ in range(rounds):
            start = time.perf_counter()
            dataset = open_dataset(path)
            opened.append(time.perf_counter() - start)
            Sampler(Packs(dataset, PACK), 8, seed=0).batch(0)
            ready.append(time.perf_counter() - start)
    return [
        Figure("seconds to open 10 million tokens", statistics.median(opened), 0.2, "<="),
        Figure("the same, packed, to the first batch", statistics.median(ready), 0.2, "<="),
    ]


def loading(rounds: int) -> Iterator[Figure]:
    """What a step of a small model waits for its packs and their rows: 4 layers of width 256, packs of 2,048 tokens."""
    from unmask import Config, Trainer

    shape = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768, "tie_word_embeddings": True}
    for objective in ("block_diffusion", "mdlm"):
        with TemporaryDirectory() as folder:
            data = {"train": str(ten_million(Path(folder))), "pack_tokens": 2048}
            tree = {"model": {"config": shape}, "data": data, "log": {"console": "none"}}
            training = {"steps": 2 + 2 * rounds, "batch_size": 4}
            path = {"path": str(Path(folder) / "run")}
            tree |= {"objective": {"name": objective}, "training": training, "checkpoint": path}
            at: list[float] = []
            waited: list[float] = []

            def watch(trainer: Any, record: Any, at: list[float] = at, waited: list[float] = waited) -> None:
                at.append(time.perf_counter())
                waited.append(trainer.loader.waited)

            Trainer(config=Config.parse(tree), callbacks=[watch]).train()
            share = (waited[-1] - waited[1]) / (at[-1] - at[1])
        yield Figure(f"{objective}: share of a step that waits for data", share, 0.01, "<=")


CASES: dict[str, Measure] = {
    "fill": fill,
    "mixing": mixing,
    "tokenising": tokenising,
    "opening": opening,
    "loading": loading,
}


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, 3, "rounds of each measurement"))
