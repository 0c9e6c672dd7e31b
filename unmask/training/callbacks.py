"""What a program may do between the steps of a run: functions, called after every step, or `Callback` objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UserError
from unmask.tracking import Record

if TYPE_CHECKING:
    from unmask.training.trainer import Trainer

#: Called after every step with the trainer and the step's record.
Function = Callable[["Trainer", Record], Any]


class Callback:
    """Any of these methods may be overridden. All processes of a run call them; `trainer.stop()` on one ends all."""

    def on_step(self, trainer: Trainer, record: Record) -> None:
        """After every step, with its record."""

    def on_evaluation(self, trainer: Trainer, record: Record) -> None:
        """After an evaluation, with its record: nats_per_token, standard_error and what else the log has of it."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """After a checkpoint; with checkpoint.background its files may not be complete yet."""


class _Function(Callback):
    """A function as a callback."""

    def __init__(self, function: Function):
        self.function = function

    def on_step(self, trainer: Trainer, record: Record) -> None:
        self.function(trainer, record)


def adopted(callbacks: Sequence[Callback | Function]) -> list[Callback]:
    """Every one as a Callback; UserError for what is neither that nor a function."""
    fits = isinstance(callbacks, Sequence) and all(
        isinstance(each, Callback) or (callable(each) and not isinstance(each, type)) for each in callbacks
    )
    if not fits:
        raise UserError(f"Trainer: callbacks is a list of functions and unmask.Callback objects, not {callbacks!r}")
    return [each if isinstance(each, Callback) else _Function(each) for each in callbacks]
