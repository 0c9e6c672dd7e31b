"""Sampling from a model that is divided over processes: through the module that gathers its parts, never past it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.attention import Plan
from unmask.models.logits import Query
from unmask.parallel.pipeline import Pipeline
from unmask.rows import inert

if TYPE_CHECKING:
    from unmask.engine.precision import Precision
    from unmask.models import RowModel
    from unmask.parallel.mesh import Mesh


class Generating:
    """`unmask.models.logits.Logits` of an engine's model.

    Processes that share the model gather its parts in every pass, so each pass is made by all of them: whoever has
    nothing left to sample makes passes over one row until nobody has (`finish`).
    """

    def __init__(self, row_model: RowModel, module: Any, mesh: Mesh, precision: Precision):
        self.row_model, self.mesh, self.precision = row_model, mesh, precision
        self.module = module if isinstance(module, Pipeline) else row_model
        self.model = row_model.model
        self.vocabulary, self.device = row_model.decoder.vocabulary, mesh.device

    @torch.no_grad()
    def __call__(self, query: Query) -> Tensor:
        """Logits [n, vocabulary] of the rows that are wanted."""
        self._others_run(True)
        return self._run(query)

    def finish(self) -> None:
        """Keep the others company until all have finished."""
        while self._others_run(False):
            self._run(self._nothing())

    def _run(self, query: Query) -> Tensor:
        with torch.no_grad(), self.precision():
            return self.module(query)

    def _others_run(self, mine: bool) -> bool:
        """Whether any process of those that share the model makes a pass now."""
        return self.mesh.divided and bool(self.mesh.largest([float(mine)])[0])

    def _nothing(self) -> Query:
        """A pass over one row that nobody reads."""
        zero = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        plan = Plan.from_rows(inert(0.0), windows=self.row_model.decoder.windows, device=self.device)
        return Query(zero, zero, zero[0], plan)
