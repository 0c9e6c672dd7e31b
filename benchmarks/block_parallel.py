"""Block parallelism against context parallelism: bytes, time over a shaped link, balance, memory, scaling.

Ranks are processes of one thread each, in network namespaces whose links are shaped to a ratio r of transfer to
compute: the time the context baseline takes to transfer alone, over the time it takes to compute alone. Every strategy
runs in the same processes, in turns; a ratio is the median over rounds of the slowest rank's
times. A round is thrown away when computing alone takes 1.1 times as long before as after it, or the other way round;
figures from fewer rounds than asked for say "inconclusive".

    python benchmarks/block_parallel.py [--json] [--rounds 7] [--only bytes links steps balance memory scaling]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report
from links import INTERFACE, Links, missing

#: A round counts when its two compute-only times differ by less; so many times as many rounds are tried.
SPREAD, PATIENCE = 1.1, 4
RATIOS = (0.2, 0.5, 1.0, 2.0)
ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 64}
MODEL = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768, "vocab_size": 512,
    "tie_word_embeddings": True, "max_position_embeddings": 65536,
}  # fmt: skip


class Ranks:
    """Worker processes, one a rank, over links or (links None) over loopback."""

    def __init__(self, size: int, links: Links | None = None, **variables: str):
        folder = tempfile.mkdtemp()
        self.size, self.processes = size, []
        for rank in range(size):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
                "STORE": f"file://{folder}/store", "GLOO_SOCKET_IFNAME": "lo" if links is None else INTERFACE,
                "TORCH_CPP_LOG_LEVEL": "ERROR", **variables,
            }  # fmt: skip
            before = [] if links is None else links.command(rank)
            command = [*before, sys.executable, str(Path(__file__).parent / "block_worker.py")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.processes.append(subprocess.Popen(command, text=True, env=environment, **pipes))

    def ask(self, what: str, *arguments: Any) -> list[dict[str, Any]]:
        self.tell(what, *arguments)
        return self.answers()

    def tell(self, what: str, *arguments: Any) -> None:
        for process in self.processes:
            process.stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        return [self._answer(process) for process in self.processes]

    @staticmethod
    def _answer(process: Any) -> dict[str, Any]:
        for line in process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        sys.exit("a benchmark worker died")

    def seconds(self, name: str) -> float:
        """The slowest rank's time of one run."""
        return max(answer["seconds"] for answer in self.ask("run", name))

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait()


def byte_figures() -> list[Figure]:
    """Exact, from the placements alone; tests hold the counters to them."""
    import numpy as np
    from block_worker import rows_of

    from unmask.blocks.axis import Layers, place, sent
    from unmask.blocks.exchange import Division, Widths, bytes_sent
    from unmask.rows import Shape

    widths = Widths(4, 2, 64)
    layers = Layers(Shape(0, 0, 256, (None,)), widths)

    def total(case: dict[str, Any], placement: str, exchange: str) -> np.ndarray:
        placed = place(rows_of(case), layers, 4, placement, exchange)
        return np.array([part.sum() for part in sent(placed, layers, exchange)])

    single, packed = {"lengths": [4096]}, {"lengths": [512] * 8}
    rows = rows_of(single)
    half = rows.clean / len(rows)  # one half where every block is noised
    csbp = total(single, "csbp", "gather") / total(single, "context", "gather")
    needed = total(packed, "csbp", "needed") / total(packed, "csbp", "gather")
    # 64 blocks of 16 queries over 65,536 clean rows, as in a drafter: clean rows have no queries.
    clean, blocks = 65536, 64 * 16
    held = tuple(np.r_[np.arange(r, clean, 4), clean + np.arange(r * 256, (r + 1) * 256)] for r in range(4))
    drafter = Division(
        None, None, held, tuple(np.arange(blocks // 4) for _ in range(4)), tuple(rows[: clean // 4] for rows in held)
    )
    query = [
        a.sum() / b.sum() for a, b in zip(*(bytes_sent(n, drafter, widths) for n in ("query", "gather")), strict=True)
    ]
    return [
        Figure("bytes: csbp over context, forward", float(csbp[0]), half, "<="),
        Figure("bytes: csbp over context, backward", float(csbp[1]), half, "<="),
        Figure("bytes: needed over gather, 8 packed documents", float(needed.max()), 0.5, "<="),
        Figure("bytes: query over gather, 64 blocks of 16 over 65,536 rows", float(max(query)), 0.05, "<="),
    ]


#: name: (placement, exchange, wire)
STRATEGIES = {
    "compute only": ("context", "gather", "compute"),
    "context": ("context", "gather", "blocking"),
    "csbp": ("csbp", "gather", "blocking"),
    "context, overlap": ("context", "gather", "overlap"),
    "csbp, overlap": ("csbp", "gather", "overlap"),
    "context, ring": ("context", "ring", "overlap"),
    "csbp, ring": ("csbp", "ring", "overlap"),
    "context, ulysses": ("context", "ulysses", "overlap"),
    "transfer only": ("context", "gather", "transfer"),
}


def link_figures(size: int, rounds: int, length: int, show: bool) -> Iterator[Figure]:
    """Attention layers forward and backward at every ratio of transfer to compute."""
    with Links(size) as links:
        ranks = Ranks(size, links)
        skipped = {"context, ulysses"} if ATTENTION["heads"] % size or size > 4 else set()
        names = [name for name in STRATEGIES if name not in skipped]
        for name in names:
            placement, exchange, wire = STRATEGIES[name]
            case = {**ATTENTION, "lengths": [length], "placement": placement, "exchange": exchange, "wire": wire}
            ranks.ask("attention", name, case)
        compute = statistics.median(ranks.seconds("compute only") for _ in range(3))
        sent = max(answer["sent"] for answer in ranks.ask("run", "context"))
        for ratio in RATIOS:
            yield from _at_ratio(ranks, links, names, (ratio, compute, sent, rounds, show))
        ranks.close()


def quiet_rounds(ranks: Ranks, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Times of `rounds` rounds in which computing alone took as long after all strategies as before them, to SPREAD.

    Other rounds are thrown away; after PATIENCE times as many, what there is has to do (at least one).
    """
    taken: dict[str, list[float]] = {name: [] for name in names}
    best: tuple[float, dict[str, float]] | None = None
    for name in names:
        ranks.seconds(name)
    for _ in range(PATIENCE * rounds):
        found = {name: ranks.seconds(name) for name in names}
        again = ranks.seconds("compute only")
        spread = max(again, found["compute only"]) / min(again, found["compute only"])
        if best is None or spread < best[0]:
            best = spread, found
        if spread > SPREAD:
            continue
        for name in names:
            taken[name].append(found[name])
        if len(taken["compute only"]) == rounds:
            break
    if best is not None and not taken["compute only"]:
        taken = {name: [seconds] for name, seconds in best[1].items()}
    return taken


def _at_ratio(
    ranks: Ranks, links: Links, names: list[str], setting: tuple[float, float, int, int, bool]
) -> list[Figure]:
    ratio, compute, sent, rounds, show = setting
    rate = sent * 8 / (ratio * compute) / 1e6
    for _ in range(3):  # the nominal rate is not what arrives
        links.rate(rate)
        times = [(ranks.seconds("transfer only"), ranks.seconds("compute only")) for _ in range(3)]
        rate *= statistics.median(transfer / alone for transfer, alone in times[1:]) / ratio
    links.rate(rate)
    taken = quiet_rounds(ranks, names, rounds)
    r = statistics.median(t / c for t, c in zip(taken["transfer only"], taken["compute only"], strict=True))
    size, kept = ranks.size, len(taken["compute only"])
    verdict = "" if kept >= rounds else f" (inconclusive: {kept} quiet rounds)"
    if show:
        print(f"P={size} r={r:.2f}{verdict}")
        for name in names:
            print(f"  {name:<18} {1000 * statistics.median(taken[name]):8.1f} ms")

    def over(slow: str, fast: str) -> float:
        return statistics.median(s / f for s, f in zip(taken[slow], taken[fast], strict=True))

    best = min((n for n in names if n.startswith("context")), key=lambda n: statistics.median(taken[n]))
    ours = min((n for n in names if n.startswith("csbp")), key=lambda n: statistics.median(taken[n]))
    where = f"P={size} r={r:.2f}: "
    figures = [
        Figure(
            where + "csbp over context, no overlap" + verdict,
            over("context", "csbp"),
            0.95 * (1 + r) / (1 + r / 2),
            ">=",
        ),
        Figure(where + f"csbp over the best baseline ({best})" + verdict, over(best, ours), 1.0, ">="),
        Figure(
            where + "csbp over context, both overlapped" + verdict,
            over("context, overlap", "csbp, overlap"),
            1.5 if ratio == 2 else 1.0,
            ">=",
        ),
    ]
    if ratio == 2:
        figures.append(
            Figure(
                where + "csbp overlapped over context, no overlap" + verdict,
                over("context", "csbp, overlap"),
                1.7,
                ">=",
            )
        )
    return figures


def step_figures(size: int, rounds: int, length: int) -> Iterator[Figure]:
    """Whole training steps at r = 0.5 and 1."""
    with Links(size) as links:
        ranks = Ranks(size, links)
        names = ("context, overlap", "csbp, overlap", "compute only")
        for name in names:
            placement, exchange, wire = STRATEGIES[name]
            case = {"model": MODEL, "lengths": [length], "placement": placement, "exchange": exchange, "wire": wire}
            ranks.ask("step", name, case)
        compute = statistics.median(ranks.seconds("compute only") for _ in range(3))
        ranks.seconds("context, overlap")
        sent = max(answer["sent"] for answer in ranks.ask("run", "context, overlap"))
        for ratio in (0.5, 1.0):
            links.rate(sent * 8 / (ratio * compute) / 1e6)
            taken: dict[str, list[float]] = {name: [] for name in names}
            for number in range(rounds + 1):
                for name in names:
                    seconds = ranks.seconds(name)
                    if number:
                        taken[name].append(seconds)
            over = statistics.median(
                a / b for a, b in zip(taken["context, overlap"], taken["csbp, overlap"], strict=True)
            )
            yield Figure(f"P={size}: whole step at nominal r={ratio}, csbp over context", over, 1.0, ">=")
        ranks.close()


def balance_figures(rounds: int) -> list[Figure]:
    """SFT with a 75 % prompt on 4 ranks: the largest rank's CPU time.

    The conventional baselines compute all 2L rows, noisy copies of the prompt too; the others leave out what no label
    needs, as csbp does.
    """
    ranks = Ranks(4)
    used: dict[str, list[list[float]]] = {}
    baselines = [("context", "gather"), ("context", "ulysses")]
    cases = [("csbp", "gather", False), ("block", "gather", False)]
    cases += [(*baseline, conventional) for baseline in baselines for conventional in (False, True)]
    for placement, exchange, conventional in cases:
        name = f"{placement}, {exchange}" + (", all rows" if conventional else "")
        case = {"model": MODEL, "lengths": [4096], "prompt": 0.75, "placement": placement, "exchange": exchange}
        ranks.ask("step", name, {**case, "wire": "overlap", "conventional": conventional})
        used[name] = []
    for number in range(rounds + 1):
        for name in used:
            answers = ranks.ask("run", name)
            if number:
                used[name].append([answer["cpu"] for answer in answers])
    ranks.close()
    largest = {
        name: max(statistics.median(column) for column in zip(*times, strict=True)) for name, times in used.items()
    }
    figures = []
    for what, all_rows in (("conventional baseline", True), ("baseline on the same rows", False)):
        others = [name for name in largest if name != "csbp, gather" and name.endswith("all rows") == all_rows]
        best = min(others, key=largest.__getitem__)
        ratio = largest["csbp, gather"] / largest[best]
        figures.append(
            Figure(f"75 % prompt, P=4: largest CPU time, csbp over the best {what} ({best})", ratio, 0.87, "<=")
        )
    return figures


def memory_figures(length: int = 32768) -> list[Figure]:
    """Peak memory above the model's, L=32768: each strategy in processes of its own.

    glibc keeps freed tensors of up to 32 MB for itself, and returns larger ones: that would be counted for four ranks
    and not for one, whose tensors are four times as large. Here it returns all from 1 MB up.
    """
    taken = {}
    for size, placement in ((1, "csbp"), (4, "csbp"), (4, "context")):
        ranks = Ranks(size, MALLOC_MMAP_THRESHOLD_=str(1 << 20))
        small = {**MODEL, "num_hidden_layers": 2}
        case = {"model": small, "lengths": [length], "placement": placement, "exchange": "ring", "wire": "overlap"}
        before = [answer["before"] for answer in ranks.ask("step", placement, case)]
        peaks = [answer["peak"] for answer in ranks.ask("run", placement)]
        taken[size, placement] = max(peak - start for peak, start in zip(peaks, before, strict=True))
        ranks.close()
    return [
        Figure(
            "L=32768, P=4: activations of the largest rank, csbp over context",
            taken[4, "csbp"] / taken[4, "context"],
            1.0,
            "<=",
        ),
        Figure(
            "L=32768, P=4: activations of the largest rank over one process's / 4",
            4 * taken[4, "csbp"] / taken[1, "csbp"],
            1.15,
            "<=",
        ),
    ]


def scaling_figures(rounds: int) -> list[Figure]:
    """Two processes over one, one thread each, L=8192; and what two processes that share nothing reach here."""
    one, twin, two = Ranks(1), Ranks(1), Ranks(2)
    case = {"model": MODEL, "lengths": [8192], "placement": "csbp", "exchange": "gather", "wire": "overlap"}
    for ranks in (one, twin, two):
        ranks.ask("step", "csbp", case)
        ranks.seconds("csbp")

    def both() -> float:
        """Seconds of one whole step in each of two processes at once."""
        for ranks in (one, twin):
            ranks.tell("run", "csbp")
        return max(ranks.answers()[0]["seconds"] for ranks in (one, twin))

    times = [(one.seconds("csbp"), two.seconds("csbp"), both()) for _ in range(rounds)]
    for ranks in (one, twin, two):
        ranks.close()
    limit = statistics.median(2 * a / c for a, _, c in times)
    return [
        Figure("L=8192: 2 processes over 1", statistics.median(a / b for a, b, _ in times), 1.9, ">="),
        Figure("L=8192: the same over two steps at once that share nothing but the machine", limit, 1.9, ">="),
        Figure("L=8192: share of that limit", statistics.median(c / (2 * b) for _, b, c in times), 0.95, ">="),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=["bytes", "links", "steps", "balance", "memory", "scaling"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    return report(figures(options), options.json)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    if "bytes" in options.only:
        yield from byte_figures()
    reason = missing()
    for part, measure in (("links", link_figures), ("steps", step_figures)):
        if part not in options.only:
            continue
        if reason:
            print(f"{part}: skipped: {reason}", file=sys.stderr)
            continue
        for size in options.ranks:
            extra = (not options.json,) if part == "links" else ()
            yield from measure(size, options.rounds, options.length, *extra)
    if "balance" in options.only:
        yield from balance_figures(options.rounds)
    if "memory" in options.only:
        yield from memory_figures()
    if "scaling" in options.only:
        yield from scaling_figures(options.rounds)


if __name__ == "__main__":
    sys.exit(main())
