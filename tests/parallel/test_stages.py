"""How layers are assigned to pipeline stages, and how long ranks idle: against all ways, and torch's own schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import generate_stage_to_rank_mapping

from tests.parallel.pipeline_cases import events
from tests.parallel.trainer_cases import Case
from tests.training.tiny import config
from unmask.config import ParallelConfig
from unmask.errors import UserError
from unmask.parallel import stages
from unmask.parallel.stages import Event, Layout


@pytest.mark.parametrize("seed", range(6))
def test_no_other_division_has_a_faster_slowest_stage(seed):
    generator = np.random.default_rng(seed)
    costs, count = generator.uniform(0.5, 2, 7).tolist(), 2 + seed % 3
    first, last = generator.uniform(0, 3, 2)

    def slowest(layers):
        ends = np.cumsum([0, *layers])
        sums = [sum(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        return max(np.array(sums) + [first, *[0] * (count - 2), last])

    every = [np.diff([0, *cuts, 7]) for cuts in combinations(range(1, 7), count - 1)]
    found = stages.balanced(costs, count, first, last)
    assert sum(found) == 7 and min(found) > 0
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


@pytest.mark.parametrize("schedule, style", [("interleaved", "loop"), ("zbv", "v")])
def test_stages_lie_where_torch_looks_for_them(schedule, style):
    layout = Layout(schedule, 3, 2, (1,) * 6)
    wanted = generate_stage_to_rank_mapping(3, 6, style)
    assert {stage: layout.rank_of(stage) for stage in range(6)} == wanted
    assert sorted(stage for rank in range(3) for stage in layout.of_rank(rank)) == list(range(6))


def simulated(ranks: Sequence[Sequence[Event]], count: int) -> tuple[float, list[float]]:
    """(seconds until all have ended, seconds each computes) of ranks that do their events in order, as soon as can be.

    Of a micro-batch, a forward pass waits for the one of the stage before, a backward pass for the one of the stage
    after. Transfers take no time.
    """
    ended: dict[tuple[bool, int, int], float] = {}
    clock, position = [0.0] * len(ranks), [0] * len(ranks)
    while any(at < len(order) for at, order in zip(position, ranks, strict=True)):
        before = list(position)
        for rank, order in enumerate(ranks):
            while position[rank] < len(order):
                kind, stage, micro, seconds = order[position[rank]]
                forward = kind == "forward"
                needed = (forward, stage - 1 if forward else stage + 1, micro)
                waits = kind != "weight" and 0 <= needed[1] < count
                if waits and needed not in ended:
                    break
                clock[rank] = max(clock[rank], ended[needed] if waits else 0.0) + seconds
                if kind != "weight":
                    ended[forward, stage, micro] = clock[rank]
                position[rank] += 1
        assert position != before, "these orders wait for each other"
    return max(clock), [sum(event.seconds for event in order) for order in ranks]


UNITS = {"forward": 1.0, "input": 1.0, "weight": 1.0, "backward": 2.0}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_the_bubble_is_that_of_the_schedule_with_equal_stages(schedule, workers, tmp_path):
    case = Case("ar", "auto", "auto", blocks=1, pipeline=2, schedule=schedule, model="uneven four", micro_batch=1)
    case = replace(case, batch_size=8)
    ranks = [[event._replace(seconds=UNITS[event.kind]) for event in theirs]
             for theirs in workers(2).run(events, case, str(tmp_path))]  # fmt: skip
    layout = stages.even(ParallelConfig(pipeline_stages=2, schedule=schedule), 4)
    ended, busy = simulated(ranks, layout.stages)
    assert busy == [8 * 3 * layout.virtual] * 2
    assert ended / busy[0] - 1 == pytest.approx(stages.bubble(ParallelConfig(pipeline_stages=2, schedule=schedule), 8))


def test_the_bubble_chooses_the_micro_batch(tmp_path):
    def chosen(*overrides):
        settings = config(tmp_path, "parallel.pipeline_stages=2", "training.batch_size=16", *overrides)
        return stages.resolved(settings).training.micro_batch

    assert chosen("parallel.bubble=0.125") == 2
    assert chosen("parallel.bubble=0.2") == 2 and chosen("parallel.bubble=0.25") == 4
    assert chosen("parallel.bubble=0.125", "training.micro_batch=2") == 2
    assert chosen("parallel.bubble=0.25", "parallel.shard_size=2") == 2
    assert chosen("parallel.bubble=0.05", "parallel.schedule=zbv") == 4
    with pytest.raises(
        UserError, match=r"bubble=0.01: no training.micro_batch .* the least is 0.062; raise batch_size"
    ):
        chosen("parallel.bubble=0.01")
    with pytest.raises(UserError, match=r"micro_batch=8: parallel.bubble=0.125 chooses 2"):
        chosen("parallel.bubble=0.125", "training.micro_batch=8")
