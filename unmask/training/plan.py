"""What a run would do, without doing it: sizes, steps, work and memory (`unmask train --dry-run`)."""

from __future__ import annotations

from typing import Any

from unmask.config import Config
from unmask.rows import flops
from unmask.training import setup
from unmask.training.trainer import continued, micro_batches


def plan(config: Config) -> dict[str, Any]:
    """The facts of a run: numbers and short strings; bytes and FLOPs are plain numbers. Writes nothing."""
    run = setup.prepare(config)
    checkpoint = continued(run)
    parameters = list(run.model.parameters())
    size = sum(p.numel() for p in parameters)
    trainable = [p for p in parameters if p.requires_grad]
    batch = run.sampler.batch(0)
    micro = micro_batches(run.objective.at(0, run.steps), batch, config.training.seed, config.training.micro_batch)
    return {
        "model": run.model.config.model_type,
        "parameters": size,
        "objective": config.objective.name,
        "mask_token_id": run.objective.mask_token_id,
        "device": str(run.device),
        "documents": len(run.dataset),
        "tokens": int(run.dataset.tokens),
        "packs": len(run.packs),
        "fill": round(float(run.packs.fill), 4),
        "steps": run.steps,
        "epochs": round(run.steps / run.sampler.steps_per_epoch, 4),
        "tokens_per_step": sum(len(document) for pack in batch for document in pack),
        "micro_batches_per_step": len(micro),
        "rows_first_step": sum(len(rows) for rows in micro),
        "labelled_first_step": sum(len(rows.labelled) for rows in micro),
        "flops_first_step": sum(flops(rows, run.row_model.shape) for rows in micro),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trainable),
        # Two moments of the parameter's own dtype.
        "optimizer_bytes": sum(2 * p.numel() * p.element_size() for p in trainable),
        "checkpoint": config.checkpoint.path,
        "goes_on_from": checkpoint and checkpoint.name,
    }


def table(facts: dict[str, Any]) -> str:
    """The facts in aligned lines, with units a person reads."""
    width = max(map(len, facts))
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {_shown(name, value)}" for name, value in facts.items())


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MB"
    if name.startswith("flops"):
        return f"{value:.3e}"
    if name == "fill":
        return f"{100 * value:.1f} %"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
