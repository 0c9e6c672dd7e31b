"""RowModel: the one module a training step calls. Rows in, the loss of the labelled rows out.

It is the root for DDP and FSDP: the decoder *and* the chunked loss run inside its forward, and nothing calls the
decoder or the head from outside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from unmask.attention import Plan
from unmask.errors import UserError
from unmask.kernels import Head
from unmask.models.decoder import decoder_layers, spec_of
from unmask.models.families import family_of_model
from unmask.models.families.materialise import device_of
from unmask.models.fused.last_layer import skipping
from unmask.models.logits import Query
from unmask.models.passes import Pass, apart, run, together
from unmask.models.prove import proofs_of
from unmask.objectives import LabelledRows
from unmask.rows import Rows, Shape, inert, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unmask.blocks.axis import BlockAxis
    from unmask.kernels import VocabularyShard
    from unmask.models.routing import Routing
    from unmask.objectives import LossTerms, Objective


@dataclass(frozen=True)
class RowBatch:
    """One pack on the model's device; keep it until backward has ended (it holds the plan).

    once: the pass of its rows through the decoder; twice: those of a model that conditions its canvases on predictions
    (none for others). labelled int64 [n]; label int64 [n]; weight fp32 [n]; columns: of the labelled rows, [n] or
    [n, k], reals in weight's dtype; count: see Rows. On several ranks these are the rows that this one holds, which are
    those numbered `held` (int64 [n]) among the pack's labelled rows, and whole(values [n]) gives the values of all.
    counted: bool [N], the rows that no earlier rank has too, of a pack with something to learn.
    """

    once: Pass
    twice: tuple[Pass, ...]
    labelled: Tensor
    label: Tensor
    weight: Tensor
    columns: dict[str, Tensor]
    count: float
    counted: Tensor
    whole: Callable[[Tensor], Tensor] | None = None
    held: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """N: how many rows run."""
        return self.once.token.shape[1]

    def labelled_rows(self, objective: Objective) -> LabelledRows:
        """What the objective's loss knows of the pack; UserError where a column that it declares is missing.

        A pack of no labelled row, as stands in for none, needs no column: empty ones take their place.
        """
        columns = {}
        for name, shape in objective.columns.items():
            if name not in self.columns and len(self.label):
                raise UserError(f"{type(objective).__name__} reads the column {name!r}, which its rows do not have")
            columns[name] = self.columns.get(name, self.weight.new_empty((0, *shape)))
        return LabelledRows(self.label, self.weight, self.count, columns)


class RowModel(nn.Module):
    """A transformers decoder over Rows.

    skip_last_layer: compute the last layer for labelled rows only; "auto" where that is proven for the model, True to
    insist (UserError where it is not).
    """

    def __init__(self, model: PreTrainedModel, *, skip_last_layer: bool | str = False, backend: str = "auto"):
        super().__init__()
        self.model = model
        self.backend = backend
        self.family = family_of_model(model)
        self.decoder = spec_of(model)
        #: Divides packs over ranks; None on one.
        self.axis: BlockAxis | None = None
        #: Watches the routers of experts while they are trained.
        self.routing: Routing | None = None
        #: Where the vocabulary is divided over a group.
        self.vocabulary_shard: VocabularyShard | None = None
        #: Whether the clean rows of a model that conditions itself run once, alone; not where a pass more sends more.
        self.apart = self.decoder.self_conditions
        proofs = proofs_of(model)
        if not proofs.plain_head:  # the head that objectives apply would not be the model's own
            raise UserError(
                f"{self.decoder.kind} does not apply its head as a plain projection: unmask cannot train it"
            )
        self.skips = bool(skip_last_layer) and proofs.skips
        if skip_last_layer is True and not self.skips:
            raise UserError(f"model.skip_last_layer=true: not proven for {self.decoder.kind}; use auto or false")
        if self.skips:
            last = decoder_layers(model)[-1]
            last.forward = cast(Any, skipping(last, self.decoder))

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def head(self) -> Head:
        """The output projection as objectives take it."""
        projection = self.model.get_output_embeddings()
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        # With the mask token's row trained by itself a tied head is peft's, which has a weight and no bias.
        bias = getattr(projection, "original_module", projection).bias
        return Head(projection.weight, bias, softcap, self.vocabulary_shard)

    @property
    def shape(self) -> Shape:
        """Parameter counts and windows for rows.flops."""
        return self.decoder.shape(self.skips)

    def collate(self, rows: Rows) -> RowBatch:
        """Tensors and the plan of one pack, or of this rank's part of it. Nothing is pruned or padded here."""
        device, vocabulary, windows = self.device, self.decoder.vocabulary, self.decoder.windows
        conditions = self.decoder.self_conditions
        largest = int(rows.token.max(initial=0))
        if largest >= vocabulary:
            raise UserError(
                f"a document holds token id {largest}, and the model has {vocabulary} embeddings: "
                f"another tokeniser's data, or a damaged file"
            )
        self._check(rows)
        self.family.check_text(self.model, rows.token[: rows.clean])
        if len(rows) == 0:  # nothing to learn from; the model cannot run on nothing
            rows = inert(rows.count)
        plan = held = whole = None
        learns, counted = len(rows.labelled) > 0, np.ones(len(rows), bool)
        if self.axis is not None:
            rows, plan, held, whole, counted = self.axis.divide(rows, device)
        if self.apart and rows.clean == len(rows):  # the passes of a rank without a canvas, too
            rows, counted = padded(rows, len(rows) + 1), np.append(counted, False)
        planned = partial(Plan.from_rows, windows=dict.fromkeys(windows), backend=self.backend, device=device)
        if plan is None:
            plan = planned(rows, labelled_window=windows[-1] if self.skips else "none")
        labelled = rows.labelled

        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        columns = ((name, tensor(column[labelled])) for name, column in rows.columns.items())
        canvas = tensor(np.arange(rows.clean, len(rows))) if conditions else None
        once = Pass(tensor(rows.token)[None], tensor(rows.position)[None], plan, canvas)
        twice = apart(rows, planned, device) if self.apart else together(once, rows) if conditions else ()
        return RowBatch(
            once=once,
            twice=twice,
            labelled=tensor(labelled),
            label=tensor(rows.label[labelled]),
            weight=tensor(rows.weight[labelled]).to(wide),
            columns={name: column.to(wide) if column.is_floating_point() else column for name, column in columns},
            count=rows.count,
            counted=tensor(counted & learns),
            whole=whole,
            held=held,
        )

    def _check(self, rows: Rows) -> None:
        """UserError for rows that a program of one's own has made, and that nothing can be computed from."""
        label = rows.label[rows.labelled]
        if rows.token.min(initial=0) < 0 or label.min(initial=0) < 0 or label.max(initial=0) >= self.decoder.vocabulary:
            raise UserError(
                f"rows: token ids and labels are from 0 to {self.decoder.vocabulary - 1}, or IGNORE for no label"
            )
        for name, column in rows.columns.items():
            numbers = isinstance(column, np.ndarray) and column.dtype.kind in "biuf" and column.ndim in (1, 2)
            if not numbers or len(column) != len(rows):
                raise UserError(f"rows: the column {name!r} is no array of numbers [{len(rows)}] or [{len(rows)}, k]")

    def decoded(self, batch: RowBatch | Query, embedded: Tensor | None = None, twice: bool = False) -> Tensor:
        """Final hidden states, [1, N, width], or of the labelled rows only where the plan says so.

        embedded: hidden states [1, N, width] to begin with in place of the tokens' embeddings; twice: conditioned on
        what a first pass predicts. Of a sampler's query, whose rows its own predictions condition, all rows'.
        """
        if isinstance(batch, Query):
            return batch.decoded(self.model.base_model, embedded)
        passes = batch.twice if twice else (batch.once,)
        return run(passes, self.model.base_model, self._signal_of, embedded)

    def _signal_of(self, hidden: Tensor) -> Tensor:
        head = self.head()
        return self.model.base_model.signal(hidden, head.weight, head.softcap)

    def hidden(self, batch: RowBatch, embedded: Tensor | None = None, twice: bool = False) -> Tensor:
        """Final hidden states of the labelled rows, [n, width]; see `decoded`."""
        hidden = self.decoded(batch, embedded, twice)[0]
        return hidden if batch.once.plan.labelled is not None else hidden.index_select(0, batch.labelled)

    def logits(self, query: Query, embedded: Tensor | None = None) -> Tensor:
        """Logits [n, vocabulary] of the rows that a sampler wants, no gradient. embedded: see `decoded`."""
        with torch.no_grad():
            hidden = self.decoded(query, embedded)
            return self.head().logits(hidden[0].index_select(0, query.keep))

    def forward(
        self,
        batch: RowBatch | Query,
        objective: Objective | None = None,
        per_row: bool = False,
        embedded: Tensor | None = None,
    ) -> LossTerms | Tensor:
        """LossTerms of the pack; with per_row, the objective's scores of every labelled row ([n], no gradient); of a
        sampler's query, its logits.

        embedded: see `decoded`.
        """
        if isinstance(batch, Query):
            return self.logits(batch, embedded)
        assert objective is not None
        watching: AbstractContextManager[None] = nullcontext()
        if self.routing is not None and not per_row:
            watching = self.routing.watching(batch.counted, batch.labelled)
        with watching:
            hidden = self.hidden(batch, embedded, objective.second_pass and not per_row)
        rows = batch.labelled_rows(objective)
        if not per_row:
            return objective.loss(hidden, self.head(), rows)
        with torch.no_grad():
            scores = objective.scores(hidden, self.head(), rows)
        return scores if batch.whole is None else batch.whole(scores)
