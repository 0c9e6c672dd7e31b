"""A decoder as samplers call it: rows in, logits of some out. Whole here, divided in `unmask.engine.generation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Query:
    """One forward pass of a sampler.

    token, position: int64 [1, N]; keep: int64 [n], the rows whose logits are wanted; plan: what attention is asked of
    (`unmask.sampling.cache.Reads`). Of a model that conditions canvases on its own predictions: canvas int64 [m], their
    rows, and before, for each canvas in turn, the logits [rows, vocabulary] of the step before (None: there is none)
    with its number of rows.
    """

    token: Tensor
    position: Tensor
    keep: Tensor
    plan: Any
    canvas: Tensor | None = None
    before: tuple[tuple[Tensor | None, int], ...] = ()

    @property
    def rows(self) -> int:
        """N: how many rows run."""
        return self.token.shape[1]

    def inputs(self, base: Any) -> dict[str, Any]:
        """What the model, or `base`, the model without its head, is called with beside tokens."""
        inputs = {"position_ids": self.position, "plan": self.plan, "use_cache": False}
        if self.canvas is None:
            return inputs
        signal = torch.cat([base.signal_of(logits, rows) for logits, rows in self.before])[None]
        return {**inputs, "canvas": self.canvas, "signal": signal}

    def decoded(self, base: Any, embedded: Tensor | None = None) -> Tensor:
        """Final hidden states of all rows, [1, N, width]; embedded: see `RowModel.decoded`."""
        start = {"input_ids": self.token} if embedded is None else {"inputs_embeds": embedded}
        return base(**start, **self.inputs(base)).last_hidden_state


class Logits(Protocol):
    """What samplers work with. model: for its configuration; vocabulary: rows of its embedding."""

    model: PreTrainedModel
    vocabulary: int

    @property
    def device(self) -> torch.device: ...

    def __call__(self, query: Query) -> Tensor:
        """Logits [n, vocabulary] of the rows that are wanted."""
        ...


class Whole:
    """A model that this process holds whole."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def __call__(self, query: Query) -> Tensor:
        inputs = query.inputs(self.model.base_model)
        return self.model(input_ids=query.token, logits_to_keep=query.keep, **inputs).logits[0]
