"""The pipeline axis: layers assigned to ranks, through which micro-batches pass (torch.distributed.pipelining).

    stage 0                 embedding, layers            hidden states ->
    stage s                 layers                       -> hidden states ->
    last stage              layers, norm, head, loss     -> hidden states; -> their gradients, all the way back

A stage is the decoder itself with the other stages' layers left out, so that names, and with them checkpoints, stay. A
rank makes the rows and the plan of every micro-batch, as all ranks of its pipeline do; only hidden states and their
gradients travel. They travel in buffers as long as the longest micro-batch so far: what is there beyond a micro-batch's
own rows is zero and cut off again.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from unmask.blocks.exchange import Traffic
from unmask.errors import UserError
from unmask.models.decoder import decoder_layers
from unmask.models.logits import Query
from unmask.models.prove import BUILT_DIFFERENTLY, close, miniature, trial_rows
from unmask.models.row_model import RowBatch, RowModel
from unmask.parallel.mesh import Mesh
from unmask.parallel.stages import Event, Layout

if TYPE_CHECKING:
    from unmask.objectives import LossTerms, Objective
    from unmask.parallel.tensor import TensorAxis

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class Absent(nn.Module):
    """In place of a module that another stage holds; hidden states pass through it."""

    def __init__(self, stands_for: nn.Module):
        super().__init__()
        self.weight = self.bias = None
        for name, value in vars(stands_for).items():
            if isinstance(value, int | str) and not name.startswith("_"):  # attention_type, layer_idx, num_embeddings
                setattr(self, name, value)

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
        return hidden


def stage_of(row_model: RowModel, layers: range, first: bool, last: bool) -> RowModel:
    """The row model with these layers only, which it shares; first: it embeds; last: it has the norm and the head."""
    found, model = copy.copy(row_model), copy.copy(row_model.model)
    base = copy.copy(model.base_model)
    found._modules, model._modules = dict(found._modules), dict(model._modules)
    base._modules = dict(base._modules)
    found._modules["model"], model._modules[model.base_model_prefix] = model, base
    _keep(model, row_model.model, layers, first, last)
    return found


def _keep(model: Any, whole: Any, layers: Collection[int], embeds: bool, last: bool) -> None:
    """Leave in `model`, whose modules are those of `whole`, these layers only; embeds: the embedding, too; last: the
    head, and the norm after the last layer (where a model has it elsewhere `check` finds that out)."""
    base, embedding, head = model.base_model, whole.get_input_embeddings(), whole.get_output_embeddings()
    base._modules["layers"] = nn.ModuleList(
        [layer if number in layers else Absent(layer) for number, layer in enumerate(decoder_layers(whole))]
    )
    left_out = [] if embeds else [(base, embedding)]
    left_out += [] if last else [(model, head), (base, base._modules.get("norm"))]
    for parent, module in left_out:
        for name, child in parent._modules.items():
            if child is module is not None:
                parent._modules[name] = Absent(module)


@torch.no_grad()
def check(model: Any) -> None:
    """UserError unless the layers of a model's miniature, each a stage, give its hidden states one after the other."""
    trial = RowModel(miniature(model)).eval()
    batch, hidden = trial.collate(trial_rows()), None
    last = len(trial.decoder.layers) - 1
    try:
        for number in range(last):
            hidden = stage_of(trial, range(number, number + 1), number == 0, False).decoded(batch, hidden)
        hidden = stage_of(trial, range(last, last + 1), not last, True).hidden(batch, hidden)
        proven = close(hidden, trial.hidden(batch))
    except BUILT_DIFFERENTLY:
        proven = False
    if not proven:
        raise UserError(
            f"parallel.pipeline_stages: {trial.decoder.kind} computes something else when its layers run one stage "
            f"after the other, so unmask does not divide it; set it to 1"
        )


@dataclass
class Work:
    """What a rank's stages compute now. found: by micro-batch, of the last stage; scale: of a loss before backward;
    events: what they have computed in this step."""

    batches: Sequence[RowBatch] = ()
    objective: Any = None
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    found: dict[int, LossTerms] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Stage(nn.Module):
    """One stage as torch's schedules call it: hidden states of micro-batch `number` in, hidden states or the loss out.

    rows: of a buffer; own(n): how many of n rows are here (a tensor axis divides them).
    """

    def __init__(
        self,
        row_model: RowModel,
        work: Work,
        arithmetic: Callable[[], AbstractContextManager[Any]],
        own: Callable[[int], int],
        wire: torch.dtype,
        last: bool,
    ):
        super().__init__()
        self.row_model, self.last = row_model, last
        self.work, self.arithmetic, self.own, self.wire = work, arithmetic, own, wire
        self.rows = 0

    def forward(self, *hidden: Tensor, number: Tensor) -> Tensor:
        index = int(number)
        batch = self.work.batches[index]
        with self.arithmetic():
            if not self.last:
                return self.padded(self.row_model.decoded(batch, self.cut(batch, *hidden)))
            terms = self.row_model(batch, self.work.objective, embedded=self.cut(batch, *hidden))
        self.work.found[index] = terms._replace(sum=terms.sum.detach().clone())
        return self.work.scale(terms.sum)

    def cut(self, batch: RowBatch, *hidden: Tensor) -> Tensor | None:
        """The micro-batch's own rows of a buffer; the first stage has none."""
        return hidden[0][:, : self.own(batch.rows)] if hidden else None

    def padded(self, hidden: Tensor) -> Tensor:
        return nn.functional.pad(hidden.to(self.wire), (0, 0, 0, self.rows - hidden.shape[1])).contiguous()


class Watched(PipelineStage):
    """torch's stage; counts what it sends, times what it computes (on a GPU work goes on after these calls return)."""

    work: Work
    traffic: Traffic
    #: The tensor axis, which must know the rows of the pack that is computed again in a backward pass.
    axis: TensorAxis | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return self._timed("forward", fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        kind = "backward" if full_backward else "input"
        self._timed(kind, bwd_chunk_id, super().backward_one_chunk, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._timed("weight", bwd_chunk_id, super().backward_weight_one_chunk, last_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        self.traffic.count("hidden states", [send.tensor for send in sends])
        return sends

    def _timed(self, kind: str, number: int, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.axis is not None:
            self.axis.rows = self.work.batches[number].rows
        start = time.perf_counter()
        try:
            return action(number, *args, **kwargs)
        finally:
            self.work.events.append(Event(kind, self.stage_index, number, time.perf_counter() - start))


class Pipeline(nn.Module):
    """A rank's stages and their schedule: what a training step calls.

    row_model: becomes, in place, the decoder with this rank's layers and nothing of the others'; arithmetic: the
    context a stage computes in; wire: the dtype of hidden states on their way; axis: the tensor axis, if any.
    """

    def __init__(
        self,
        row_model: RowModel,
        mesh: Mesh,
        layout: Layout,
        arithmetic: Callable[[], AbstractContextManager[Any]],
        wire: torch.dtype,
        axis: TensorAxis | None = None,
    ):
        super().__init__()
        self.mesh, self.layout, self.axis, self.wire = mesh, layout, axis, wire
        self.rank, self.group = mesh.position["pipeline"], mesh.pipeline
        self.work, model = Work(), row_model.model
        # Of an error torch prints the whole schedule; whoever runs the program is told in one sentence.
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
        self.width = row_model.decoder.width
        ranks = 1 if axis is None else axis.size
        self.own = lambda rows: -(-rows // ranks)
        self.stages = nn.ModuleList()
        for stage in self.numbers:
            last = stage == layout.stages - 1
            part = stage_of(row_model, layout.span(stage), stage == 0, last)
            if axis is not None and not last:  # rows stay divided on the way
                part.model.base_model._forward_hooks = type(part.model.base_model._forward_hooks)()
            self.stages.append(Stage(part, self.work, arithmetic, self.own, wire, last))
        self.first, self.last = 0 in self.numbers, layout.stages - 1 in self.numbers
        shared = _weight(model.get_input_embeddings()) is _weight(model.get_output_embeddings())
        #: Whether this rank holds one of two copies of a weight that embedding and head share.
        self.tied = shared and self.first != self.last
        ours = {layer for number in self.numbers for layer in layout.span(number)}
        _keep(model, model, ours, self.first or self.tied, self.last)
        self.row_model = row_model
        self._schedule: tuple[Any, tuple[int, int]] | None = None
        self._rows = 0
        self._idle = 0.0

    @property
    def numbers(self) -> list[int]:
        return self.layout.of_rank(self.rank)

    def forward(
        self,
        batches: Sequence[RowBatch] | RowBatch | Query,
        objective: Objective | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        per_row: bool = False,
    ) -> list[LossTerms] | Tensor:
        """Forward and backward of a step's micro-batches: their terms, where the last stage is, else none.

        scale: of a loss, before its backward. With per_row, forward of one pack: its nll as RowModel gives it; of a
        sampler's query likewise its logits.
        """
        if isinstance(batches, Query):
            return self._logits(batches)
        assert objective is not None
        if per_row:
            return self._nll(cast(RowBatch, batches), objective)
        batches = cast(Sequence[RowBatch], batches)
        work = self.work
        work.batches, work.objective, work.found, work.events = batches, objective, {}, []
        work.scale = scale or work.scale
        schedule = self._scheduled(len(batches), max(batch.rows for batch in batches))
        start = time.perf_counter()
        number = torch.arange(len(batches))
        try:
            schedule.step(number=number, target=number, losses=[], return_outputs=False)
        except RuntimeError as error:  # torch tells of the stage and its arguments, and gives as cause what went wrong
            raise _cause(error) from None
        self._idle += time.perf_counter() - start - sum(event.seconds for event in work.events)
        work.batches = ()
        return [work.found[index] for index in sorted(work.found)]

    def collate(self, rows: Any) -> RowBatch:
        return self.row_model.collate(rows)

    def read(self) -> dict[str, float]:
        """Seconds this rank has waited for others between computing, since the last reading; on a CPU."""
        idle, self._idle = self._idle, 0.0
        return {"rank_idle": round(idle, 4)} if self.mesh.device.type == "cpu" else {}

    def duplicates(self) -> set[nn.Parameter]:
        """Parameters that another stage has as well, and counts."""
        return {_weight(self.row_model.model.get_output_embeddings())} if self.tied and self.last else set()

    def tied_gradient(self) -> Tensor | None:
        """The gradient of a weight whose other copy is on the other end of the pipeline."""
        return _weight(self.row_model.model.get_input_embeddings()).grad if self.tied else None

    def _scheduled(self, micro: int, rows: int) -> Any:
        """torch's schedule for so many micro-batches, with buffers of so many rows or more."""
        if self._schedule is None or self._schedule[1][0] != micro or self._schedule[1][1] < rows:
            self._rows = max(self._rows, rows)
            stages = [
                self._stage(number, cast(Stage, stage)) for number, stage in zip(self.numbers, self.stages, strict=True)
            ]
            made: Any = stages if self.layout.schedule in ("interleaved", "zbv") else stages[0]
            schedule = SCHEDULES[self.layout.schedule](made, micro, loss_fn=lambda loss, _: loss, scale_grads=False)
            self._schedule = (schedule, (micro, self._rows))
        return self._schedule[0]

    def _stage(self, number: int, stage: Stage) -> PipelineStage:
        stage.rows = self.own(self._rows)
        hidden = torch.empty((1, stage.rows, self.width), dtype=self.wire, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        ends = (torch.empty(0, device="meta") if number == 0 else hidden, loss if stage.last else hidden)
        made = Watched(stage, number, self.layout.stages, self.mesh.device, *ends, group=self.group)
        made.work, made.traffic, made.axis = self.work, self.mesh.traffic, self.axis
        return made

    def _nll(self, batch: RowBatch, objective: Objective) -> Tensor:
        """The nll of every labelled row of the pack, on all of its pipeline's ranks."""
        return self._through(batch, lambda last, hidden: last(batch, objective, per_row=True, embedded=hidden))

    def _logits(self, query: Query) -> Tensor:
        """Logits [n, vocabulary] of the rows that a sampler wants, on all of its pipeline's ranks."""
        return self._through(query, lambda last, hidden: last.logits(query, hidden))

    def _through(self, batch: RowBatch | Query, last: Callable[[RowModel, Tensor | None], Tensor]) -> Tensor:
        """One pack through all stages, forward only: what `last` makes of it, in fp32 at least, on every rank."""
        hidden, found = None, torch.empty(0)
        wide = torch.promote_types(self.row_model.model.dtype, torch.float32)
        for number, stage in zip(self.numbers, cast(Any, self.stages), strict=True):
            if number and self.layout.rank_of(number - 1) != self.rank:
                hidden = torch.empty((1, self.own(batch.rows), self.width), dtype=self.wire, device=self.mesh.device)
                dist.recv(hidden, group=self.group, group_src=self.layout.rank_of(number - 1))
            with stage.arithmetic():
                if stage.last:
                    found = last(stage.row_model, hidden).to(wide)
                    break
                hidden = stage.row_model.decoded(batch, hidden).to(self.wire).contiguous()
            if self.layout.rank_of(number + 1) != self.rank:
                dist.send(hidden, group=self.group, group_dst=self.layout.rank_of(number + 1))
        source = self.layout.rank_of(self.layout.stages - 1)
        shape = torch.tensor([found.ndim, *found.shape, 0][:3], device=self.mesh.device)
        dist.broadcast(shape, group=self.group, group_src=source)
        dimensions, *sizes = shape.tolist()
        if not self.last:
            found = torch.empty(sizes[:dimensions], dtype=wide, device=self.mesh.device)
        found = found.contiguous()
        dist.broadcast(found, group=self.group, group_src=source)
        return found


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _weight(module: nn.Module) -> Any:
    """The parameter, also where a tensor axis computes with a local tensor in its place."""
    return module._parameters.get("weight")
