"""The `parallel` section: how many processes share what; `unmask.config.rules` says what goes together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unmask.config.section import Section


class ParallelConfig(Section):
    """Sizes of the mesh axes; their product must be the number of processes."""

    #: Data-parallel replicas of the model, each with its own micro-batches of a batch.
    data_parallel_size: int = Field(default=1, ge=1)
    #: Ranks over which FSDP2 shards a replica; each has its own micro-batches. Block-parallel ranks shard it further.
    shard_size: int = Field(default=1, ge=1)
    #: What is sharded (ZeRO): 1 optimiser state, 2 also gradients, 3 also parameters. Empty: 3, in a pipeline 1.
    zero: Literal[1, 2, 3] | None = None
    #: Layers whose parameters are gathered ahead of the one that runs; 0: torch's default.
    prefetch: int = Field(default=0, ge=0)
    #: Keep sharded parameters, gradients and optimiser state in CPU memory, and update them there.
    offload: bool = False
    #: Ranks that split a packed sequence (context parallelism): see `placement` and `exchange`.
    block_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that split every layer (tensor and sequence parallelism); the innermost axis, so neighbours.
    model_parallel_size: int = Field(default=1, ge=1)
    #: Ranks that divide the experts of every layer; they are some of the ranks of replicas, shards and blocks.
    expert_parallel_size: int = Field(default=1, ge=1)
    #: Pipeline stages: ranks to which the layers are assigned in order (pipeline parallelism); the outermost axis.
    pipeline_stages: int = Field(default=1, ge=1)
    #: Order in which a pipeline's ranks compute micro-batches: gpipe, 1f1b, interleaved, or zbv (zero bubble, ZB-V).
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    #: interleaved: stages per rank; empty: 2.
    virtual_stages: int | None = Field(default=None, ge=2)
    #: Layers of each stage; empty: balanced, so that the slowest stage is fastest, by times measured at the start.
    stage_layers: list[Annotated[int, Field(gt=0)]] | None = None
    #: Choose training.micro_batch: the largest whose bubble (idle over compute time) is at most this; empty: keep it.
    bubble: float | None = Field(default=None, gt=0)
    #: Which rank computes which rows of a pack: csbp, context, block, serial; `auto`: least work, then fewest bytes.
    placement: str = "auto"
    #: How attention gets other ranks' keys: gather, ring, needed, query, ulysses, ulysses+ring; `auto`: fewest bytes.
    exchange: str = "auto"
    #: Neighbouring ranks on a fast network, for two-level exchanges (ulysses+ring).
    node_size: int | None = Field(default=None, ge=1)
    #: Relative speeds of the ranks of a pack, for placement: a list, `measured` at the start, or `equal`.
    speeds: Literal["equal", "measured"] | list[Annotated[float, Field(gt=0)]] = "equal"
    #: Seconds without a message from another rank after which a run stops.
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
