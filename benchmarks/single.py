"""One process: our training step against the conventional one, on the same model, data and optimiser.

The conventional step is what public block-diffusion trainers do: rows [noisy; clean], a dense 2L x 2L boolean mask
through SDPA, logits for all 2L rows, cross-entropy on the noisy half. Both sides run Qwen3 (4 layers, width 256, 4/2
heads of 64, MLP 768, vocabulary 8192, tied), block 32, fp32, batch 1, and include AdamW. Steps take turns; the ratio is
the median over rounds, memory is each process's peak.

    python benchmarks/single.py [--json] [--rounds 3] [--only 2048 8192 ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, Measure, Worker, interleave, ratio, run_cases

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    "max_position_embeddings": 65536,
}
BLOCK, MASK = 32, 8191


@dataclass(frozen=True)
class Case:
    """One side of a comparison. prompt: the fraction of tokens that is not supervised."""

    length: int
    prompt: float = 0.0
    objective: str = "block_diffusion"
    skip: bool = True
    precision: str = "fp32"
    checkpointing: str = "none"
    options: dict[str, Any] = field(default_factory=dict)


class Step:
    """A callable training step with facts about itself (model FLOPs of a step)."""

    def __init__(self, run: Callable[[], Any], facts: dict[str, float]):
        self.run, self.facts = run, facts

    def __call__(self) -> None:
        self.run()


def documents(case: Case) -> Any:
    import numpy as np

    from unmask.rows import Document

    token = np.random.default_rng(0).integers(0, MASK, case.length)
    return [Document(token, np.arange(case.length) >= case.prompt * case.length)]


def conventional(case: Case) -> Step:
    """Dense mask, logits of every row; two views as two sequences for Fast-dLLM v2."""
    import numpy as np
    import torch
    from torch.nn import functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(SHAPE)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    length = case.length
    clean = torch.from_numpy(documents(case)[0].token)
    supervised = torch.arange(length) >= case.prompt * length
    block = torch.arange(length) // BLOCK
    own, before, causal = block[:, None] == block, block[:, None] > block, block[:, None] >= block
    mask = torch.cat([torch.cat([own, before], 1), torch.cat([torch.zeros_like(own), causal], 1)])[None, None]
    position = torch.arange(length).repeat(2)[None]
    generator = np.random.default_rng(1)

    def run() -> None:
        level = torch.from_numpy(generator.uniform(1e-3, 1, (length + BLOCK - 1) // BLOCK))[block].float()
        noised = (torch.from_numpy(generator.random(length)) < level) & supervised
        noisy = clean.masked_fill(noised, MASK)
        logits = model(input_ids=torch.cat([noisy, clean])[None], attention_mask=mask, position_ids=position).logits
        nll = F.cross_entropy(logits[0, :length].float(), clean, reduction="none")
        ((nll * noised / level).sum() / supervised.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Step(run, {})


def ours(case: Case) -> Step:
    """The package's own step: rows, tiles, labelled rows only."""
    return training_step(case, documents(case), lambda rows: rows)


def two_sequences(case: Case) -> Step:
    """Fast-dLLM v2 without the shared clean stream: the first view of one copy of the text, the second of another."""
    import numpy as np

    def separate(rows: Any) -> Any:
        from dataclasses import replace

        # Both copies get both views, in turns and with the same noise; keep view d of copy d.
        keep = (rows.block < 0) | (rows.block % 2 == rows.document)
        half = rows.take(np.flatnonzero(keep))
        return replace(half, block=np.where(half.block < 0, half.block, half.block // 2), count=rows.count / 2)

    return training_step(case, documents(case) * 2, separate)


def training_step(case: Case, texts: Any, change: Callable[[Any], Any]) -> Step:
    """A whole step of ours over `texts`, its rows passed through `change` first."""
    import torch

    from unmask.config import ModelConfig
    from unmask.engine import activations
    from unmask.models import RowModel, load
    from unmask.objectives import build
    from unmask.rows import flops

    loaded = load(ModelConfig(config=SHAPE, mask_token_id=MASK))
    row_model = RowModel(loaded.model, skip_last_layer=case.skip)
    activations.apply(loaded.model, case.checkpointing)
    row_model.train()
    optimizer = torch.optim.AdamW(row_model.parameters(), lr=1e-4, fused=True)
    objective = build(case.objective, {"block_size": BLOCK, **case.options})
    objective = objective.model_copy(update={"mask_token_id": MASK})
    seeds = iter(range(1_000_000))

    def run() -> None:
        rows = change(objective.rows(texts, next(seeds))).pruned()
        batch = row_model.collate(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            terms = row_model(batch, objective)
        (terms.sum / batch.count).backward()
        torch.nn.utils.clip_grad_norm_(row_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    work = [flops(change(objective.rows(texts, seed)).pruned(), row_model.shape) for seed in range(3)]
    return Step(run, {"flops": sum(work) / len(work)})


def gemm() -> Step:
    """The machine's matmul rate, fp32: one product of 2048 x 2048 matrices, four times."""
    import torch

    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)

    def run() -> None:
        for _ in range(4):
            a @ b

    return Step(run, {"flops": 4 * 2 * 2048.0**3})


def against_conventional(case: Case, faster: float, smaller: float, rounds: int) -> list[Figure]:
    name = f"L={case.length}" + (f", {case.prompt:.0%} prompt" if case.prompt else "")
    workers = [Worker("conventional", conventional, case), Worker("ours", ours, case)]
    interleave(workers, rounds)
    theirs, mine = workers
    figures = [
        Figure(f"{name}: tokens/s over the conventional step", ratio(theirs, mine), faster, ">="),
        Figure(f"{name}: peak memory over the conventional step", mine.peak_bytes / theirs.peak_bytes, smaller, "<="),
    ]
    for worker in workers:
        worker.close()
    return figures


def gemm_fraction(rounds: int) -> list[Figure]:
    workers = [Worker("ours", ours, Case(8192, skip=False)), Worker("gemm", gemm)]
    interleave(workers, rounds)
    mine, peak = workers
    rates = [
        mine.facts["flops"] / m / (peak.facts["flops"] / g) for m, g in zip(mine.seconds, peak.seconds, strict=True)
    ]
    for worker in workers:
        worker.close()
    return [Figure("L=8192, nothing skipped: share of the GEMM rate", sorted(rates)[len(rates) // 2], 0.70, ">=")]


def shared_clean_stream(rounds: int) -> list[Figure]:
    """Fast-dLLM v2's two views over one clean stream, against the same two views as two sequences, both by us."""
    case = Case(2048, objective="fast_dllm_v2", skip=False)
    workers = [Worker("two sequences", two_sequences, case), Worker("shared", ours, case)]
    interleave(workers, rounds)
    figure = Figure("fast_dllm_v2, L=2048: shared clean stream over two sequences", ratio(*workers), 1.25, ">=")
    for worker in workers:
        worker.close()
    return [figure]


def bf16_over_fp32(rounds: int) -> list[Figure]:
    workers = [Worker("fp32", ours, Case(2048)), Worker("bf16", ours, Case(2048, precision="bf16"))]
    interleave(workers, rounds)
    figure = Figure("L=2048: bf16 autocast over fp32", ratio(*workers), 1.5, ">=")
    for worker in workers:
        worker.close()
    return [figure]


def long_context() -> list[Figure]:
    worker = Worker("ours", ours, Case(32768, checkpointing="full"))
    interleave([worker], 1, warmup=0)
    worker.close()
    return [Figure("L=32768 with checkpointing: peak memory in GB", worker.peak_bytes / 1e9, 6.0, "<=")]


CASES: dict[str, Measure] = {
    "2048": lambda rounds: against_conventional(Case(2048), 2.5, 0.65, rounds),
    "8192": lambda rounds: against_conventional(Case(8192), 4.0, 0.30, rounds),
    "8192-prompt": lambda rounds: against_conventional(Case(8192, prompt=0.75), 5.5, 0.20, rounds),
    "gemm": gemm_fraction,
    "fast": shared_clean_stream,
    "bf16": bf16_over_fp32,
    "32768": lambda rounds: long_context(),
}


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, 3, "steps of each side"))
