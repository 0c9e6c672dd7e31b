"""The `parallel` section: how many processes share what, and which of these settings have an effect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unmask.config.section import Section
from unmask.errors import UserError


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
        copies = self.data_parallel_size * self.shard_size
        return self.pipeline_stages * copies * self.block_parallel_size * self.model_parallel_size

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
    def expert_shards(self) -> int:
        """Ranks that FSDP2 divides a rank's experts over: those of a copy that hold the same ones."""
        return self.shards // self.expert_parallel_size if self.shards % self.expert_parallel_size == 0 else 1

    def refuse_unsupported(self) -> None:
        """What this version cannot do is refused before a worker starts."""
        ranks = self.data_parallel_size * self.shard_size * self.block_parallel_size
        if ranks % self.expert_parallel_size:
            raise UserError(
                f"parallel.expert_parallel_size={self.expert_parallel_size} does not divide the {ranks} ranks of "
                f"data_parallel_size x shard_size x block_parallel_size, among which experts are divided"
            )
        for key in ("model_parallel_size", "pipeline_stages"):
            if self.expert_parallel_size > 1 and getattr(self, key) > 1:
                raise UserError(
                    f"parallel.expert_parallel_size={self.expert_parallel_size} does not go with parallel.{key}="
                    f"{getattr(self, key)}: set one of them to 1"
                )
        self._refuse_of_pipeline()
        if not self.level:
            self._refuse_given(
                ("zero", "prefetch", "offload"),
                ": no ranks divide a copy of the model; give parallel.shard_size=2 or more",
            )
        blocks, node = self.block_parallel_size, self.node_size
        if blocks == 1:
            self._refuse_given(
                ("placement", "exchange", "node_size", "speeds"),
                " with block_parallel_size=1: leave it out, or give a pack several ranks",
            )
        if "+" in self.exchange and (node is None or not 1 < node < blocks or blocks % node):
            raise UserError(
                f"parallel.exchange={self.exchange} needs parallel.node_size, a divisor of "
                f"block_parallel_size={blocks} strictly between 1 and it"
            )
        if node is not None and "+" not in self.exchange:
            raise UserError(
                f"parallel.node_size={node} has no effect with exchange={self.exchange}: leave it out, or choose an "
                f"exchange of two levels such as ulysses+ring"
            )
        if isinstance(self.speeds, list) and len(self.speeds) != blocks:
            raise UserError(
                f"parallel.speeds lists {len(self.speeds)} ranks, and block_parallel_size is {blocks}: give one each"
            )

    def _refuse_of_pipeline(self) -> None:
        if self.pipeline_stages == 1:
            self._refuse_given(
                ("schedule", "virtual_stages", "stage_layers", "bubble"),
                " with pipeline_stages=1: leave it out, or give the layers several ranks",
            )
            return
        if self.virtual_stages is not None and self.schedule != "interleaved":
            raise UserError(
                f"parallel.virtual_stages={self.virtual_stages} has no effect with schedule={self.schedule}: leave it "
                f"out, or use interleaved"
            )
        if self.zero in (2, 3):
            raise UserError(
                f"parallel.zero={self.zero} does not go with pipeline_stages={self.pipeline_stages}: the ranks of a "
                f"pipeline sum gradients once a step, over all of its micro-batches; use zero=1"
            )
        if self.prefetch:
            raise UserError(
                f"parallel.prefetch={self.prefetch} has no effect with pipeline_stages={self.pipeline_stages}, where a "
                f"rank's layers stay gathered for a step: set it to 0"
            )
        stages = self.pipeline_stages * self.virtual
        if self.stage_layers is not None and len(self.stage_layers) != stages:
            raise UserError(
                f"parallel.stage_layers lists {len(self.stage_layers)} stages, and there are {stages} (pipeline_stages "
                f"x stages of a rank): give one number each"
            )

    def _refuse_given(self, keys: tuple[str, ...], why: str) -> None:
        """UserError for one of these that is not at its default, and has no effect."""
        for key in keys:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise UserError(f"parallel.{key}={value} has no effect{why}")
