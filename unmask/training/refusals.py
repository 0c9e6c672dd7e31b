"""What a run is refused for before its first step besides its settings: data with nothing to learn, a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from unmask.data.mixing import NOTHING
from unmask.errors import UserError
from unmask.objectives import Objective
from unmask.objectives.base import needs_mask
from unmask.rows import Document

if TYPE_CHECKING:
    from unmask.data import Dataset

#: Tokens of a dataset that are searched for the mask token before the first step.
SCANNED = 1 << 28


def check_writable(path: Path) -> None:
    """Raise UserError when a run cannot be written to `path`; leaves nothing there."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"checkpoint.path={path}: {existing} is not a folder")
    try:  # permissions alone do not tell: not on a read-only disk, not for root, not in /proc
        TemporaryDirectory(dir=existing, prefix=".unmask-").cleanup()
    except OSError as error:
        raise UserError(f"checkpoint.path={path}: {existing} is not writable: {error.strerror}") from None


def check_targets(objective: Objective, packs: Iterable[Sequence[Document]], where: str) -> None:
    """Raise UserError unless some document of `packs` has a token that the objective scores; stops at the first."""
    try:
        exact: Any = objective.evaluation()
    except NotImplementedError:
        exact = None
    for pack in packs:
        supervised = [document for document in pack if document.supervised.any()]
        if supervised and (exact is None or len(exact.rows(supervised, 0).labelled)):
            return
    raise UserError(f"{where}: {NOTHING}")


def check_mask(objective: Objective, dataset: Dataset, where: str) -> None:
    """Raise UserError where the model would learn to predict the mask token. What lies further back than SCANNED is
    found when its step comes."""
    if not objective.places_mask:
        return
    mask = needs_mask(objective)
    number = dataset.learns(mask, SCANNED)
    if number is not None:
        raise UserError(
            f"{where}: document {number} holds the mask token (id {mask}), which only noise may place: prepare it "
            f"again without, or choose another model.mask_token_id"
        )


def check_bound(objective: Objective) -> None:
    """Raise UserError when validation data are given for an objective that has no likelihood bound."""
    try:
        objective.evaluation()
    except NotImplementedError as error:
        raise UserError(f"data.validation: {error}: leave it out") from None
