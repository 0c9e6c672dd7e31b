"""Trainer runs whose numbers must be those of one process, as data: MATRIX are all, COVER those that are always run.

MATRIX is what is proven; `docs/generate.py` makes the support tables of docs/parallelism.md from it. COVER is chosen by
`tests.parallel.covering` so that every pair of objective, placement, exchange, axis, data, precision and accumulation
that can occur does occur, and every kind of rows under every placement and exchange. The rows beyond it are marked
`full`: `make test-all`, or pytest -m "full or not full".
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product

from tests.parallel.covering import add_pairs, cover
from tests.parallel.trainer_cases import LONG_STEPS, OBJECTIVES, Case

EXCHANGES = ("gather", "ring", "needed", "query", "ulysses", "ulysses+ring", "auto")
CELLS = [*product(("context", "csbp"), EXCHANGES), ("block", "auto"), ("auto", "auto")]

#: Ranks a cell is proven on, where heads do not say otherwise, and what else varies from cell to cell.
RANKS = (2, 3, 2, 4)
DATA = ("packed", "long", "prompt")
CHECKPOINTING = ("none", "none", "selective", "none", "full")


def cells() -> list[Case]:
    """Every objective under every placement and exchange; data, checkpointing and ranks take turns."""
    turn, found = count(), []
    for objective, (placement, exchange) in product(OBJECTIVES, CELLS):
        i = next(turn)
        blocks = RANKS[(i + i // len(CELLS)) % len(RANKS)]
        if exchange.startswith("ulysses"):  # four query heads, two key heads
            blocks = 4 if "+" in exchange or blocks == 3 else blocks
        found.append(
            Case(
                *(objective, placement, exchange, blocks),
                data=DATA[(i // 2) % len(DATA)],
                checkpointing=CHECKPOINTING[i % len(CHECKPOINTING)],
            )
        )
    return found


BASE = Case("block_diffusion (bd3lm)", "csbp", "auto")
MESHES = [
    replace(Case(objective, placement, "auto", blocks, replicas), batch_size=4, micro_batch=1, data=data)
    for (blocks, replicas), (objective, placement, data) in zip(
        [(2, 2), (1, 4), (3, 1), (1, 2), (1, 3), (2, 2), (1, 2), (2, 2)],
        [
            ("block_diffusion (bd3lm)", "csbp", "prompt"),
            ("mdlm (llada)", "auto", "prompt"),
            ("ar", "context", "packed"),
            ("block_diffusion (llada2)", "auto", "prompt"),
            ("fast_dllm_v2", "auto", "packed"),
            ("mdlm (dream)", "context", "prompt"),
            ("block_diffusion (sdar)", "auto", "long"),
            ("ar", "auto", "prompt"),
        ],
        strict=True,
    )
]
ACCUMULATION = [
    replace(BASE, batch_size=4, micro_batch=micro, blocks=blocks, objective=objective, checkpointing=checkpointing)
    for micro, blocks, objective, checkpointing in (
        (1, 2, "block_diffusion (bd3lm)", "none"),
        (2, 3, "mdlm (mdlm)", "full"),
        (2, 4, "block_diffusion (2 draws)", "selective"),
    )
]
WINDOWS = [
    replace(
        BASE, model="sliding", placement=placement, exchange=exchange, blocks=blocks, objective=objective, data=data
    )
    for (placement, exchange, blocks), (objective, data) in zip(
        [
            ("csbp", "needed", 4),
            ("context", "ring", 3),
            ("csbp", "query", 2),
            ("csbp", "ulysses", 2),
            ("block", "auto", 3),
        ],
        [
            ("block_diffusion (bd3lm)", "long"),
            ("ar", "long"),
            ("fast_dllm_v2", "packed"),
            ("block_diffusion (causal clean)", "prompt"),
            ("block_diffusion (sdar)", "long"),
        ],
        strict=True,
    )
]
#: Adam divides by |gradient| + eps: with its 1e-8, entries whose gradient is rounding noise take whole steps of noise
#: (11 of 20,672 weights differed by up to 2e-5 on four ranks, by 2e-14 in fp64).
SMOOTH = ("optimizer.eps=1e-4",)
SINGLES = {"dtype": "float32", "options": SMOOTH}
SINGLE = [
    replace(
        BASE,
        dtype="float32",
        options=SMOOTH,
        objective=objective,
        placement=placement,
        exchange=exchange,
        blocks=blocks,
    )
    for objective, (placement, exchange, blocks) in zip(
        OBJECTIVES,
        [("context", "gather", 2), ("csbp", "ring", 3), ("context", "needed", 4), ("csbp", "ulysses", 2)] * 2
        + [("csbp", "query", 4), ("block", "auto", 2)],
        strict=True,
    )
]
EVALUATED = ("evaluation.every=3", "evaluation.packs=0")
BOUNDS = [
    replace(BASE, objective="clip auto", replicas=2, micro_batch=1, options=EVALUATED),
    replace(BASE, objective="clip auto", blocks=3, options=EVALUATED),
    replace(BASE, objective="mdlm (mdlm)", placement="context", exchange="ring", options=EVALUATED),
    replace(BASE, objective="ar", placement="block", blocks=4, options=EVALUATED),
]
SERIAL = [
    replace(BASE, placement="serial"),
    replace(BASE, placement="serial", blocks=3, objective="mdlm (llada)", data="long"),
]
TENSOR = [
    replace(BASE, blocks=1, tensor=2),
    replace(BASE, blocks=1, tensor=2, objective="ar", data="long", checkpointing="full"),
    replace(BASE, blocks=1, tensor=2, objective="mdlm (mdlm)", checkpointing="selective", data="prompt"),
    replace(
        BASE, blocks=1, tensor=2, objective="fast_dllm_v2", batch_size=4, micro_batch=1, dtype="float32", options=SMOOTH
    ),
    replace(BASE, blocks=2, tensor=2, data="long"),
    replace(
        BASE, blocks=2, tensor=2, placement="context", exchange="ring", objective="mdlm (llada)", checkpointing="mlp"
    ),
    replace(BASE, blocks=1, tensor=2, model="sliding", data="long", objective="block_diffusion (causal clean)"),
    replace(BASE, blocks=1, tensor=4, model="uneven", checkpointing="selective"),
    replace(BASE, blocks=2, tensor=2, model="uneven", objective="fast_dllm_v2", exchange="ulysses"),
    replace(BASE, blocks=1, replicas=2, tensor=2, batch_size=4, micro_batch=1, data="prompt"),
    replace(BASE, blocks=1, shards=2, tensor=2, batch_size=4, micro_batch=1, options=("optimizer.state=bf16",)),
    replace(BASE, blocks=2, replicas=2, tensor=2, batch_size=4, micro_batch=1, objective="block_diffusion (sdar)"),
]
#: Matrices that are large enough for means in blocks (`unmask.engine.optim.low_precision`).
BLOCKS = ("model.config.intermediate_size=128",)
#: FSDP2: (copies, shards, blocks, level of ZeRO), and what else varies. Six micro-batches on four ranks: some run on
#: nothing; on three ranks no dimension divides.
SHARDED = [
    replace(
        Case(objective, placement, "auto", blocks, replicas, data, micro_batch=1, checkpointing=checkpointing),
        **{"shards": shards, "zero": zero, "batch_size": batch_size, **more},
    )
    for (replicas, shards, blocks, zero), (objective, placement, data, batch_size, checkpointing), more in (
        ((1, 2, 1, 3), ("block_diffusion (bd3lm)", "auto", "prompt", 4, "none"), {}),
        ((1, 2, 1, 2), ("mdlm (llada)", "auto", "prompt", 4, "selective"), {}),
        ((1, 2, 1, 1), ("fast_dllm_v2", "auto", "packed", 4, "full"), {}),
        ((1, 2, 1, 3), ("fast_dllm_v2", "auto", "packed", 2, "selective"), {"prefetch": 1}),
        ((1, 3, 1, 3), ("ar", "auto", "packed", 4, "none"), {}),
        ((1, 4, 1, 3), ("mdlm (dream)", "auto", "packed", 6, "full"), {}),
        ((1, 4, 1, 1), ("block_diffusion (sdar)", "auto", "prompt", 6, "mlp"), {}),
        ((2, 2, 1, 3), ("block_diffusion (llada2)", "auto", "long", 8, "none"), {}),
        ((2, 2, 1, 1), ("mdlm (mdlm)", "auto", "prompt", 6, "selective"), {}),
        ((2, 1, 2, 2), ("fast_dllm_v2", "csbp", "packed", 4, "none"), {}),
        ((1, 1, 2, 3), ("block_diffusion (bd3lm)", "csbp", "prompt", 2, "selective"), {}),
        ((1, 2, 2, 3), ("block_diffusion (bd3lm)", "csbp", "prompt", 4, "full"), {"prefetch": 2}),
        ((1, 2, 2, 2), ("fast_dllm_v2", "auto", "packed", 4, "selective"), {}),
        ((1, 2, 2, 1), ("mdlm (llada)", "context", "long", 3, "none"), {}),
        ((1, 2, 1, 3), ("block_diffusion (bd3lm)", "auto", "packed", 4, "none"), {"model": "experts", **SINGLES}),
        ((1, 2, 2, 3), ("fast_dllm_v2", "csbp", "packed", 2, "mlp"), {"model": "experts", **SINGLES}),
        ((2, 2, 1, 2), ("mdlm (llada)", "auto", "prompt", 6, "none"), SINGLES),
        ((1, 2, 1, 3), ("clip auto", "auto", "packed", 4, "none"), {"options": EVALUATED}),
        ((1, 2, 1, 3), ("mdlm (llada)", "auto", "packed", 4, "none"), {"options": ("optimizer.state=8bit", *BLOCKS)}),
        ((2, 2, 1, 2), ("ar", "auto", "packed", 6, "none"), {"options": ("optimizer.state=4bit", *BLOCKS)}),
    )
]
#: Pipelines of (ranks, copies, shards, blocks, tensor): schedule, objective, model, data, and what else varies. Model
#: "five" has five layers and is tied, "uneven" untied; without stage_layers the stages are measured.
PIPELINE = [
    replace(
        Case(objective, more.pop("placement", "auto"), "auto", blocks, replicas, data, 4, 1),
        **{"pipeline": ranks, "shards": shards, "tensor": tensor, "schedule": schedule, "model": model, **more},
    )
    for (ranks, replicas, shards, blocks, tensor), (schedule, objective, model, data), more in (
        ((2, 1, 1, 1, 1), ("1f1b", "block_diffusion (bd3lm)", "full", "prompt"), {"stage_layers": (1, 1)}),
        ((2, 1, 1, 1, 1), ("gpipe", "mdlm (llada)", "uneven", "packed"), {"batch_size": 3}),
        ((2, 1, 1, 1, 1), ("interleaved", "fast_dllm_v2", "uneven four", "packed"), {}),
        ((2, 1, 1, 1, 1), ("zbv", "block_diffusion (bd3lm)", "five", "prompt"), {"stage_layers": (1, 2, 1, 1)}),
        ((2, 1, 1, 1, 1), ("zbv", "mdlm (mdlm)", "uneven four", "packed"), {"checkpointing": "mlp"}),
        (
            (2, 1, 1, 1, 1),
            ("1f1b", "block_diffusion (causal clean)", "sliding", "long"),
            {"checkpointing": "selective"},
        ),
        ((2, 1, 1, 1, 1), ("1f1b", "fast_dllm_v2", "experts", "packed"), SINGLES),
        ((2, 1, 1, 1, 1), ("zbv", "fast_dllm_v2", "five", "packed"), SINGLES),
        ((2, 1, 1, 1, 1), ("1f1b", "clip auto", "full", "packed"), {"options": EVALUATED}),
        ((2, 1, 1, 1, 1), ("zbv", "clip auto", "five", "packed"), {"options": (*EVALUATED, "training.ema=0.9")}),
        ((4, 1, 1, 1, 1), ("1f1b", "mdlm (dream)", "five", "packed"), {"stage_layers": (2, 1, 1, 1)}),
        ((2, 2, 1, 1, 1), ("gpipe", "block_diffusion (sdar)", "full", "prompt"), {"batch_size": 5}),
        ((2, 1, 2, 1, 1), ("1f1b", "block_diffusion (bd3lm)", "full", "prompt"), {}),
        ((2, 1, 2, 1, 1), ("interleaved", "clip auto", "uneven four", "packed"), {"options": EVALUATED}),
        ((2, 1, 2, 1, 1), ("zbv", "fast_dllm_v2", "five", "packed"), {"batch_size": 6}),
        ((2, 1, 1, 1, 2), ("1f1b", "block_diffusion (bd3lm)", "full", "packed"), {"checkpointing": "full"}),
        ((2, 1, 1, 1, 2), ("interleaved", "mdlm (llada)", "uneven four", "prompt"), {"checkpointing": "mlp"}),
        ((2, 1, 1, 2, 1), ("1f1b", "fast_dllm_v2", "full", "prompt"), {"placement": "csbp"}),
        ((2, 1, 1, 2, 1), ("zbv", "mdlm (llada)", "five", "long"), {"placement": "context"}),
        ((2, 1, 2, 2, 1), ("1f1b", "block_diffusion (bd3lm)", "full", "packed"), {"placement": "csbp"}),
    )
]
MLP = [replace(BASE, checkpointing="mlp"), replace(BASE, blocks=1, shards=2, micro_batch=1, checkpointing="mlp")]
LOSSES = ("model.balance_loss=0.5", "model.z_loss=0.2")
#: Experts divided over ranks of the other axes: (copies, shards, blocks, ranks of an expert group). One process makes
#: the micro-batches of several where routers have losses, which are theirs.
EXPERTS = [
    replace(
        Case(objective, placement, "auto", blocks, replicas, data, 4, micro, checkpointing, model="experts"),
        **{"shards": shards, "experts": experts, **more},
    )
    for (replicas, shards, blocks, experts), (objective, placement, data, micro, checkpointing), more in (
        ((2, 1, 1, 2), ("block_diffusion (bd3lm)", "auto", "prompt", 1, "none"), {}),
        ((2, 1, 1, 2), ("fast_dllm_v2", "auto", "packed", 1, "full"), {"options": LOSSES}),
        ((2, 1, 1, 2), ("mdlm (llada)", "auto", "packed", 1, "selective"), SINGLES),
        ((1, 2, 1, 2), ("block_diffusion (bd3lm)", "auto", "packed", 1, "full"), SINGLES),
        ((1, 2, 1, 2), ("mdlm (llada)", "auto", "packed", 1, "none"), {"options": LOSSES, "zero": 2}),
        ((1, 2, 1, 2), ("fast_dllm_v2", "auto", "packed", 1, "selective"), {}),
        ((1, 1, 2, 2), ("fast_dllm_v2", "block", "packed", 2, "selective"), {"options": LOSSES}),
        ((1, 1, 2, 2), ("block_diffusion (bd3lm)", "csbp", "prompt", 2, "none"), {"options": LOSSES}),
        ((1, 1, 2, 2), ("mdlm (llada)", "context", "packed", 2, "full"), {}),
        ((1, 4, 1, 2), ("block_diffusion (bd3lm)", "auto", "prompt", 1, "none"), {}),
        ((2, 2, 1, 2), ("mdlm (llada)", "auto", "packed", 1, "none"), {"zero": 1}),
        ((2, 2, 1, 4), ("fast_dllm_v2", "auto", "packed", 1, "none"), SINGLES),
        ((1, 2, 2, 2), ("block_diffusion (bd3lm)", "csbp", "packed", 2, "selective"), {"options": LOSSES}),
    )
]
#: Kinds of three axes at once, on eight processes.
EIGHT = [replace(BASE, blocks=1, pipeline=2, replicas=2, tensor=2, batch_size=4, micro_batch=1, data="prompt")]
HAND = [*cells(), *MESHES, *ACCUMULATION, *WINDOWS, *SINGLE, *BOUNDS, *SERIAL, *SHARDED, *TENSOR]
HAND += [*PIPELINE, *MLP, *EXPERTS, *EIGHT]

#: Pairs that can occur and that no row of four processes shows; each belongs to the list of its axis.
PAIRS = add_pairs([case for case in HAND if case.ranks <= 4])
PIPELINE += [*EIGHT, *(case for case in PAIRS if case.pipeline > 1)]
TENSOR += [case for case in PAIRS if case.tensor > 1]
EXPERTS += [case for case in PAIRS if case.experts > 1]
SHARDED += [case for case in PAIRS if case.shards > 1]

#: A row with steps that have no label, which only a long run meets.
EMPTY = next(case for case in cells() if case.objective == BASE.objective and case.data == "prompt")
#: Rows that are long enough to see a difference grow, one for each axis.
LONG = [EMPTY, SINGLE[1], MESHES[2], MESHES[7], ACCUMULATION[1], SHARDED[0], TENSOR[0], PIPELINE[0], EXPERTS[0]]
MATRIX = [replace(case, steps=LONG_STEPS) if case in LONG else case for case in [*HAND, *PAIRS]]
#: Always run: rows of up to four processes, and of eight the one of three axes that nothing smaller shows.
AFFORDABLE = [case for case in MATRIX if case.ranks <= 4 or case in EIGHT]
COVER = cover(AFFORDABLE, always=[case for case in MATRIX if case.steps == LONG_STEPS])
