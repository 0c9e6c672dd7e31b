"""Pairwise coverings of the parity matrix: which pairs of values a run shows, and few runs that show them all.

Greedy, as in Cohen et al., "The AETG system" (1997): again and again the row that shows most of what is still missing
for the processes that it takes. Nothing is drawn by chance: the same rows come out everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, product

from tests.parallel.trainer_cases import OBJECTIVES, Case

AXES = ("blocks", "replicas", "shards", "tensor", "pipeline", "experts")
#: Placements that choose among exchanges; the others have one of their own.
CHOOSING = ("context", "csbp")
EXCHANGES = ("gather", "ring", "needed", "query", "ulysses", "auto")

#: Objectives whose rows, and what each may see, are those of another: they differ in what the loss makes of them.
SAME_ROWS = {
    "mdlm (dream)": "mdlm (llada)",
    "mdlm (mdlm)": "mdlm (llada)",
    "block_diffusion (sdar)": "block_diffusion (bd3lm)",
    "block_diffusion (llada2)": "block_diffusion (bd3lm)",
}

Pair = frozenset[tuple[str, object]]


def values(case: Case) -> set[tuple[str, object]]:
    """What a run shows of each kind: (kind, value)."""
    found = {("objective", case.objective), ("data", case.data), ("precision", case.dtype)}
    found.add(("accumulation", case.batch_size > case.micro_batch * case.replicas * case.shards))
    found |= {("axis", axis) for axis in AXES if getattr(case, axis) > 1}
    if case.blocks > 1:
        found.add(("placement", case.placement))
        found |= {("exchange", case.exchange)} if case.placement in (*CHOOSING, "auto") else set()
    return found


def details(case: Case) -> set[tuple[str, object]]:
    """What else a run shows; each goes with every axis of the run."""
    found: set[tuple[str, object]] = {("checkpointing", case.checkpointing), ("model", case.model), ("zero", case.zero)}
    found |= {("option", option) for option in case.options} | {("prefetch", case.prefetch)}
    return found | ({("schedule", case.schedule)} if case.pipeline > 1 else set())


def pairs(case: Case) -> set[Pair]:
    """All pairs of values of a run."""
    return {frozenset(pair) for pair in combinations(values(case), 2)}


def shown(case: Case) -> set[Pair]:
    """Pairs of values, and of an axis and a detail; rows, placement and exchange, and the axes all together."""
    axes = [value for value in values(case) if value[0] == "axis"]
    found = pairs(case) | {frozenset(pair) for pair in product(axes, details(case))}
    found.add(frozenset([("axes", tuple(sorted(str(axis) for _, axis in axes)))]))
    return found | ({three(case)} if case.blocks > 1 else set())


def three(case: Case) -> Pair:
    """Rows of the objective, placement and exchange together: of what sees all three, every combination is run."""
    rows = SAME_ROWS.get(case.objective, case.objective)
    return frozenset([("rows", rows), ("placement", case.placement), ("exchange", case.exchange)])


def candidates() -> list[Case]:
    """Runs of two to four processes with every value of every kind that can go together."""
    found = []
    meshes = [{"replicas": 2}, {"shards": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2}, {"replicas": 2, "experts": 2}]
    cells = [*product(CHOOSING, EXCHANGES), *((alone, "auto") for alone in ("block", "auto", "serial"))]
    across = [{}, *meshes[:-1], {"experts": 2}]
    places = [({**mesh, "blocks": 1}, ("auto", "auto")) for mesh in meshes]
    places += [({**mesh, "blocks": 2}, cell) for mesh, cell in product(across, cells)]
    single = {"dtype": "float32", "options": ("optimizer.eps=1e-4",)}
    for (sizes, (placement, exchange)), objective, data, precision, accumulated in product(
        places, OBJECTIVES, ("packed", "long", "prompt"), ({}, single), (False, True)
    ):
        divided = sizes.get("replicas", 1) * sizes.get("shards", 1)
        if "pipeline" in sizes and not accumulated:  # a pipeline needs a micro-batch for each stage
            continue
        model = "experts" if "experts" in sizes else "full"
        if exchange == "ulysses" and "tensor" in sizes:  # key heads for both
            model = "uneven"
        batch = {"batch_size": 4 if accumulated else 2, "micro_batch": 1 if divided > 1 or accumulated else 2}
        case = Case(objective, placement, exchange, data=data, model=model)
        found.append(replace(case, **{**sizes, **precision, **batch}))
    return found


def add_pairs(rows: list[Case]) -> list[Case]:
    """Runs for the pairs that can occur and that no row of `rows` shows."""
    possible = candidates()
    known = set().union(*map(pairs, rows))
    return _greedy(possible, set().union(*map(pairs, possible)) - known, pairs)


def cover(rows: Iterable[Case], always: Iterable[Case] = ()) -> list[Case]:
    """Rows, in their order, that show every pair which `rows` show: those of `always`, and few others."""
    rows, kept = list(rows), list(always)
    missing = set().union(*map(shown, rows)) - set().union(*map(shown, kept))
    chosen = {*kept, *_greedy(rows, missing, shown)}
    return [row for row in rows if row in chosen]


def _greedy(rows: list[Case], missing: set[Pair], shows: Callable[[Case], set[Pair]]) -> list[Case]:
    """Of rows that show as much for their processes: the one whose values have been chosen least."""
    numbers = {pair: 1 << number for number, pair in enumerate(missing)}
    masks = [(sum(numbers.get(pair, 0) for pair in shows(row)), row) for row in rows]
    left, used, chosen = (1 << len(missing)) - 1, Counter[tuple[str, object]](), []
    while left:
        worth = [(mask & left).bit_count() / (1 + row.ranks) for mask, row in masks]
        best = max(worth)
        ties = [entry for entry, value in zip(masks, worth, strict=True) if value == best]
        mask, row = min(ties, key=lambda entry: sum(used[value] for value in values(entry[1])))
        left &= ~mask
        used.update(values(row))
        chosen.append(row)
    return chosen
