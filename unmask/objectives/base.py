"""What an objective is: documents in, Rows out, and the loss of the labelled rows' hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from unmask.config import Section
from unmask.errors import UserError
from unmask.registry import nearest
from unmask.rows import Document, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.kernels import Head


@dataclass(frozen=True)
class LabelledRows:
    """What a loss knows of a pack's n labelled rows, of those that this rank has: see `unmask.rows.Rows`.

    label int64 [n], weight [n]; count: of the whole pack; columns: those that the objective declares, [n] or [n, k].
    """

    label: Tensor
    weight: Tensor
    count: float
    columns: dict[str, Tensor]


class LossTerms(NamedTuple):
    """sum (a scalar with gradient) over labelled rows, the count that divides it globally, detached metric sums.

    metrics: scalars under the same names at every call, summed over all rows and ranks: `labelled`, the number of rows,
    by which the log divides the others: `nll_sum`, which it calls nll, and any more under their own names.
    nll: of every labelled row, [n], detached; None for a loss that has none, whose log then lacks the loss by level.
    """

    sum: Tensor
    count: float  # type: ignore[assignment]  # a tuple (FSDP looks inside tuples), whose own count() nobody calls
    metrics: dict[str, Tensor]
    nll: Tensor | None = None


class Decoding(NamedTuple):
    """What a sampler must know of how a model was trained.

    kind: "causal" (next token), "full" (one noisy block per document, no clean rows) or "block" (noisy blocks of
    `block_size` after clean, block-causal context); shift: a row predicts the token after it, not its own;
    causal: for "block", the clean rows see only what is before them and themselves. A "canvas" is a block that begins
    with random tokens and has no masks.
    """

    kind: str
    block_size: int | None
    shift: bool
    causal: bool = False


class Objective(Section):
    """A training objective; its fields are its options in the config, unknown ones are refused.

    Everything random is a function of (seed, document.sample, draw): see `noise`. `rows` may be called with any
    part of a step's documents; `levels` sees all of them, so that noise levels can be stratified over the step.
    Every denominator grows with `draws`, so that the loss stays a mean.

    An objective with published variants lists them in `presets`, {variant: its options}, and declares a field
    `variant`; a preset is the default of every option that was not given.
    """

    model_config = ConfigDict(frozen=True)
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    #: The columns of rows that `loss` and `scores` read, and their shape after the rows': () for [N], (k,) for [N, k].
    columns: ClassVar[dict[str, tuple[int, ...]]] = {}

    #: Filled in from the model when a run starts; not an option.
    mask_token_id: int | None = Field(default=None, exclude=True)
    #: Noise draws per block (per document for mdlm), sharing one clean pass.
    draws: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, options: Any) -> Any:
        if not cls.presets or not isinstance(options, dict):
            return options
        name = options.get("variant", cls.model_fields["variant"].default)
        if not isinstance(name, str) or name not in cls.presets:
            raise ValueError(
                f"unknown variant {name!r}{nearest(str(name), list(cls.presets))}; known: {', '.join(cls.presets)}"
            )
        return {**cls.presets[name], **options}

    def unused(self) -> dict[str, str]:
        """Options without effect beside the values of the others -> what they need; by default none.

        `build` refuses one that was given. Options that come from a checkpoint are all there, used or not.
        """
        return {}

    @property
    @abstractmethod
    def decoding(self) -> Decoding:
        """How a model trained by this objective is sampled."""

    @abstractmethod
    def rows(self, documents: Sequence[Document], seed: int, levels: Sequence[Any] | None = None) -> Rows:
        """The rows of one pack. `levels`: this pack's part of `levels(all documents of the step)`."""

    def levels(self, documents: Sequence[Document], seed: int) -> list[Any]:
        """The noise levels of every document of a step, in the form `rows` takes them back; by default none.

        `rows` without levels takes its documents for the whole step.
        """
        return [None] * len(documents)

    def settled(self) -> dict[str, Any]:
        """The options to go on training a finished model by: those that are not the variant's, at their last value."""
        options = self.model_dump(mode="json")
        variant = {"variant": options["variant"]} if "variant" in options else {}
        plain = type(self)(**variant).model_dump(mode="json")
        return variant | {key: value for key, value in options.items() if value != plain[key]}

    def bind(self, model: Any, tokenizer: Any, mask_token_id: int | None) -> Objective:
        """The objective with what follows from the model, its tokeniser (or None) and its mask token.

        UserError for a model that it does not train; here, one without a mask token where noise places it.
        """
        if mask_token_id is None and self.places_mask:
            raise UserError(
                f"objective {type(self).__name__}: it masks tokens, and {type(model).__name__} has no mask token; "
                f"use objective.name=diffusion_gemma"
            )
        return self.model_copy(update={"mask_token_id": mask_token_id})

    def bound(self) -> dict[str, Any]:
        """What `bind` has filled in and no checkpoint records."""
        return {name: getattr(self, name) for name, field in type(self).model_fields.items() if field.exclude}

    @property
    def places_mask(self) -> bool:
        """Whether noise puts the mask token in place of others."""
        return self.decoding.kind != "causal"

    @property
    def second_pass(self) -> bool:
        """Whether noisy rows with a `signal` are conditioned on the predictions of a first no-grad pass."""
        return False

    def at(self, step: int, steps: int) -> Objective:
        """The objective as it stands at `step` of `steps` (block-size schedules); by default unchanged."""
        return self

    def moving(self, step: int, steps: int) -> dict[str, Any]:
        """Options that change during training, as they stand at `step` of `steps`, for the log; by default none."""
        return {}

    def evaluation(self) -> Objective:
        """The objective whose expected sum / count bounds the negative log-likelihood, in nats per scored token.

        Its rows hold exact-count noise, stratified over the documents that `levels` is given, and `draws` of it. Its
        docstring says which tokens are scored, given what.
        """
        raise NotImplementedError(f"{type(self).__name__} has no likelihood bound")

    def scored_tokens(self, document: Document) -> np.ndarray:
        """The tokens that `evaluation` scores, bool [n]: the supervised, but position 0 where no row predicts it."""
        found = document.supervised.copy()
        found[:1] &= not self.decoding.shift
        return found

    def reclip(self, level: np.ndarray, loss: np.ndarray) -> Objective:
        """The objective after an evaluation whose blocks had these (level, loss), as `clip.scored_blocks` gives them.

        By default unchanged; block diffusion with `clip: auto` moves its window of noise levels.
        """
        return self

    def loss(self, hidden: Tensor, head: Head, rows: LabelledRows) -> LossTerms:
        """Weighted cross-entropy of the labelled rows; hidden [n, width].

        The sum is not divided by count: that is done globally. It must be a sum over rows, of which ranks have some
        each, and pads none: a rank may have no row at all (n = 0), and calls it all the same.
        """
        total, nll = head.cross_entropy(hidden, rows.label, rows.weight, self.excluded_token)
        nll = nll.detach()
        return LossTerms(total, rows.count, {"nll_sum": nll.sum(), "labelled": nll.new_tensor(float(len(nll)))}, nll)

    def scores(self, hidden: Tensor, head: Head, rows: LabelledRows) -> Tensor:
        """What evaluation sums of every labelled row, times its weight, [n]; taken without gradient.

        -log p(label). The objective that `evaluation` returns must leave it so for its bound to be one of likelihood.
        """
        return head.cross_entropy(hidden, rows.label, rows.weight, self.excluded_token)[1]

    @property
    def excluded_token(self) -> int | None:
        """The token whose logit is -inf in the loss (MDLM's SUBS parameterisation excludes the mask token)."""
        return None


def needs_mask(objective: Objective) -> int:
    """The mask token id, or a ValueError for an objective that was never bound to a model."""
    if objective.mask_token_id is None:
        raise ValueError("the objective has no mask_token_id: bind it with objective.model_copy(update=...)")
    return objective.mask_token_id
