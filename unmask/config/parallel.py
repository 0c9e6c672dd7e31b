"""The `parallel` section: how many processes share what; `unmask.config.rules` says what goes together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unmask.config.section import Section


class ParallelConfig(Section):
    """Sizes of the mesh axes; their product must be the number of processes."""

    #: Copies of the model that share a batch.
    data_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that a copy is divided over by FSDP2; each takes micro-batches of its own. Blocks' ranks divide it further.
    shard_size: int = Field(default=1, ge=1)
    #: What is divided (ZeRO): 1 optimiser state, 2 also gradients, 3 also parameters. Empty: 3, in a pipeline 1.
    zero: Literal[1, 2, 3] | None = None
    #: Layers whose parameters are gathered ahead of the one that runs; 0: when torch does so by itself.
    prefetch: int = Field(default=0, ge=0)
    #: Divided parameters, gradients and optimiser state are kept in the CPU's memory, and updated there.
    offload: bool = False
    #: Ranks that share a pack: see `placement` and `exchange`.
    block_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that every layer is divided over (tensor and sequence parallelism); innermost, so neighbours.
    model_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that the experts of every layer are divided over; they are among those of copies, shards and blocks.
    expert_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that the layers are dealt out to, first layers first (pipeline parallelism); outermost.
    pipeline_stages: int = Field(default=1, ge=1)
    #: In which order a pipeline's ranks compute micro-batches: gpipe, 1f1b, interleaved, or zbv (zero bubble, ZB-V).
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    #: interleaved: stages of a rank; empty: 2.
    virtual_stages: int | None = Field(default=None, ge=2)
    #: Layers of every stage; empty: so that the slowest stage takes least, by times measured at the start.
    stage_layers: list[Annotated[int, Field(gt=0)]] | None = None
    #: Chooses training.micro_batch: the largest for which ranks idle at most this share of their work; empty: as given.
    bubble: float | None = Field(default=None, gt=0)
    #: Which rank of a pack owns which rows: csbp, context, block, serial; `auto`: least work, then fewest bytes.
    placement: str = "auto"
    #: How attention reaches others' keys: gather, ring, needed, query, ulysses, ulysses+ring; `auto`: fewest bytes.
    exchange: str = "auto"
    #: Neighbouring ranks that a fast network joins, for exchanges of two levels (ulysses+ring).
    node_size: int | None = Field(default=None, ge=1)
    #: Relative speeds of a pack's ranks, for placement: a list, `measured` at the start, or `equal`.
    speeds: Literal["equal", "measured"] | list[Annotated[float, Field(gt=0)]] = "equal"
    #: Seconds without a sign of another rank after which a run stops.
    timeout: float = Field(default=600.0, gt=0)

    @property
    def processes(self) -> int:
        """What the axes multiply to."""
        return self.pipeline_stages * self.data_ranks * self.model_parallel_size

    @property
    def data_ranks(self) -> int:
        """Ranks that compute different rows: copies x shards x blocks."""
        return self.data_parallel_size * self.shard_size * self.block_parallel_size

    @property
    def level(self) -> int:
        """The level of ZeRO over shard_size x block_parallel_size ranks; 0: every rank holds everything."""
        if self.shard_size == 1 and (self.zero is None or self.block_parallel_size == 1):
            return 0
        return self.zero or (3 if self.pipeline_stages == 1 else 1)

    @property
    def shards(self) -> int:
        """Ranks that a copy of the model is divided over."""
        return self.shard_size * self.block_parallel_size if self.level else 1

    @property
    def virtual(self) -> int:
        """Stages that a rank of the pipeline holds."""
        return {"interleaved": self.virtual_stages or 2, "zbv": 2}.get(self.schedule, 1)

    @property
    def stages(self) -> int:
        """Stages of the pipeline, on all of its ranks."""
        return self.pipeline_stages * self.virtual

    def too_few(self, micro: int) -> str | None:
        """Why the schedule does not run on `micro` micro-batches of a rank; None where it does."""
        ranks, schedule = self.pipeline_stages, self.schedule
        least = {"gpipe": 1, "zbv": 2 * ranks - 1}.get(schedule, ranks)
        if micro < least:
            return f"schedule={schedule} on pipeline_stages={ranks} needs at least {least} micro-batches"
        if schedule == "interleaved" and micro % (micro // ranks):
            rounds = f"in rounds of equal size, at least pipeline_stages={ranks} each"
            return f"schedule=interleaved takes micro-batches {rounds}"
        return None

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP2 divides a rank's experts over: those of a copy that hold the same ones."""
        return self.shards // self.expert_parallel_size if self.shards % self.expert_parallel_size == 0 else 1
