"""What a run would do, without doing it: sizes, steps, work and memory (`unmask train --dry-run`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from unmask.blocks.axis import Placed, place
from unmask.config import Config
from unmask.data import Mixture, end_policy
from unmask.data.beginnings import shown
from unmask.errors import UserError
from unmask.objectives import described
from unmask.parallel.apply import layers_of
from unmask.parallel.stages import bubble, resolved
from unmask.planning.footprint import footprint
from unmask.planning.picture import facts, picture
from unmask.rows import Document, Rows, flops
from unmask.runs.resume import continued
from unmask.training import setup
from unmask.training.opening import predicted
from unmask.training.source import Packs, micro_batches

#: Facts of a placement that add up over the micro-batches of a step, in lists by rank.
PER_RANK = ("rank_rows", "rank_pairs", "rank_bytes_forward", "rank_bytes_backward")


def plan(config: Config) -> dict[str, Any]:
    """The facts of a run: numbers and short strings; bytes and FLOPs are plain numbers. Writes nothing."""
    config = resolved(config)
    run = setup.prepare(config)
    checkpoint = continued(run.identity)
    size = sum(parameter.numel() for parameter in run.model.parameters())
    packs, source, micro = packed(run)
    step = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
    seconds = predicted(run, micro, step, config.parallel.processes)
    placed = placements(run, micro)
    first = {key: placed[0][1][key] for key in ("placement", "exchange")} if placed else {}
    ranks = {key: [sum(parts) for parts in zip(*(found[key] for _, found in placed), strict=True)] for key in PER_RANK}
    return {
        "model": run.model.config.model_type,
        "parameters": size,
        "objective": described(run.objective),
        "mask_token_id": run.objective.mask_token_id,
        "device": str(run.device),
        "documents": source.mixture.documents,
        "tokens": source.mixture.tokens,
        **left_out(source.mixture),
        "packs": len(source.mixture),
        "fill": round(float(source.mixture.fill), 4),
        "steps": run.steps,
        "epochs": _epochs(run, source),
        **sources(run, source.mixture),
        **({"bos": shown(run.tokenizer)} if run.tokenizer is not None else {}),
        **ends(run, packs),
        "tokens_per_step": sum(len(document) for pack in packs for document in pack),
        "micro_batches_per_step": len(micro),
        "rows_first_step": sum(len(rows) for rows in micro),
        "labelled_first_step": sum(len(rows.labelled) for rows in micro),
        "flops_first_step": sum(flops(rows, run.row_model.shape) for rows in micro),
        "seconds_predicted": seconds and [round(each, 1) for each in dict.fromkeys(seconds)],
        **memory_facts(run, micro, placed),
        "checkpoint": config.checkpoint.path,
        "goes_on_from": checkpoint and checkpoint.name,
        **({"processes": config.parallel.processes} if config.parallel.processes > 1 else {}),
        **pipeline(run),
        **({**first, **ranks} if placed else {}),
    }


def packed(run: setup.Run) -> tuple[list[list[Document]], Packs, list[Rows]]:
    """The packs of the first step, the source that gives them, and their rows."""
    assert isinstance(run.source, Packs)  # a config names no other
    packs = run.source.documents(0)
    training = run.config.training
    objective = run.objective.at(0, run.steps)
    return packs, run.source, micro_batches(objective, packs, training.seed, training.micro_batch)


def _epochs(run: setup.Run, source: Packs) -> float:
    """Passes over the data: as asked for, else what the steps make."""
    asked = run.config.training
    return asked.epochs if asked.steps is None else round(source.sampler.passes(run.steps), 4)


def left_out(packs: Mixture) -> dict[str, Any]:
    """Documents longer than a pack, parts without a label, and answers that are cut from their prompt; where any."""
    counts = {"dropped_documents": packs.dropped, "parts_without_label": packs.silent, "cut_answers": packs.severed}
    return {name: count for name, count in counts.items() if count}


def pipeline(run: setup.Run) -> dict[str, Any]:
    """Of a pipeline: its stages, and the share of the time ranks compute for which they idle, were stages equal."""
    parallel = run.config.parallel
    if parallel.pipeline_stages == 1:
        return {}
    layers = parallel.stage_layers or "measured at the start"
    return {
        "schedule": parallel.schedule,
        "stage_layers": layers,
        "bubble": round(bubble(parallel, run.config.passes()), 4),
    }


def sources(run: setup.Run, mixture: Mixture) -> dict[str, Any]:
    """Of several sources: what each one is, and how much of it the run sees, in lists by source."""
    if len(mixture.sources) == 1:
        return {}
    passes = mixture.passes(run.steps * run.config.training.batch_size)
    tokens = [source.packs.tokens for source in mixture.sources]
    seen = [count * own for count, own in zip(passes, tokens, strict=True)]
    return {
        "sources": [source.name.removeprefix("data.train=") for source in mixture.sources],
        "source_tokens": tokens,
        "source_share": [round(count / sum(seen), 4) for count in seen],
        "source_passes": [round(count, 4) for count in passes],
    }


def ends(run: setup.Run, batch: list[list[Document]]) -> dict[str, Any]:
    """Of pairs and conversations, by the documents of the first step: after which answers an end token is learnt."""
    policy = end_policy([document for pack in batch for document in pack], run.tokenizer) if run.tokenizer else None
    return {"eos": policy} if policy else {}


def memory_facts(run: setup.Run, micro: list[Rows], placed: list[tuple[Placed, dict[str, Any]]]) -> dict[str, Any]:
    """Bytes of the first step on one device, of several ranks the one with most rows; None where unknown."""
    elsewhere = 0
    if placed:
        heaviest = max(placed, key=lambda each: max(each[1]["rank_rows"]))
        division, counts = heaviest[0], heaviest[1]["rank_rows"]
        micro = [division.local(int(np.argmax(counts)))[1]] * len(micro)
        elsewhere = int((division.rows.block < 0).sum() - (micro[0].block < 0).sum())
    found = footprint(run, micro, max(0, elsewhere))
    parts = ("parameters", "gradients", "optimizer", "averages", "activations", "allocator", "process", "peak")
    names = ("parameter", "gradient", "optimizer", "average", "activation", "allocator", "process", "peak")
    facts = {f"{name}_bytes": found and getattr(found, part) for name, part in zip(names, parts, strict=True)}
    if run.config.parallel.offload:
        facts["host_bytes"] = found and found.host
    return facts | (
        {"gathered_bytes": found and found.gathered}
        if run.config.parallel.level
        or run.config.parallel.model_parallel_size * run.config.parallel.expert_parallel_size > 1
        else {}
    )


def placements(run: setup.Run, micro: list[Rows]) -> list[tuple[Placed, dict[str, Any]]]:
    """How each pack lies on the block axis, and what every rank has to do for it; nothing where the axis has one rank.

    Bytes are those of one forward and backward pass, without recomputation.
    """
    parallel, row_model = run.config.parallel, run.row_model
    if parallel.block_parallel_size == 1:
        return []
    layers = layers_of(row_model, parallel, run.precision.dtype)
    speeds = np.array(parallel.speeds) if isinstance(parallel.speeds, list) else None
    found = []
    for rows in micro:
        ranks, node = parallel.block_parallel_size, parallel.node_size
        placed = place(rows, layers, ranks, parallel.placement, parallel.exchange, speeds, node)
        found.append((placed, facts(placed, layers, parallel.exchange, parallel.node_size)))
    return found


def inspect(config: Config) -> tuple[str, list[dict[str, Any]]]:
    """The first micro-batch's placement as a picture, and the facts of every micro-batch of the first step."""
    config = resolved(config)
    run = setup.prepare(config)
    if config.parallel.block_parallel_size == 1:
        raise UserError(
            "parallel.block_parallel_size=1: no ranks share a pack, so there is no placement to show; give "
            "parallel.block_parallel_size=4"
        )
    placed = placements(run, packed(run)[2])
    return picture(*placed[0]), [found for _, found in placed]
