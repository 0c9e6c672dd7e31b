"""Block sizes that change during training: LLaDA2's warm-up, stable, decay (Bie et al. 2512.15745).

An AR model is converted by growing the block (1 -> 4 -> 32 -> 64 -> 4096), trained on whole documents as MDLM, and
brought back to the size it is served with (4096 -> 2048 -> ... -> 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from unmask.config import Section


def _size(value: Any) -> Any:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if value != "full" and (isinstance(value, bool) or not whole or value < 1):
        raise ValueError(f"{value!r} is not a block size: give a whole number of tokens, at least 1, or full")
    return value if value == "full" else int(value)


#: Tokens in a block, or "full": the whole document is one noisy block and there are no clean rows (MDLM).
BlockSize = Annotated[int | Literal["full"], BeforeValidator(_size)]


class Phase(Section):
    """A stretch of training with one block size.

    until: where it ends; at most 1, a fraction of all steps, above 1, a step; nothing: the end of training.
    """

    model_config = ConfigDict(frozen=True)

    until: float | None = Field(default=None, gt=0)
    size: BlockSize


def size_at(phases: Sequence[Phase], step: int, steps: int) -> int | Literal["full"]:
    """The block size at `step` (from 0) of `steps`; the last phase lasts to the end."""
    for phase in phases[:-1]:
        assert phase.until is not None  # held by checked()
        if step < (phase.until * steps if phase.until <= 1 else phase.until):
            return phase.size
    return phases[-1].size


def checked(phases: Sequence[Phase]) -> None:
    """ValueError unless every phase but the last says where it ends, in increasing order."""
    if not phases:
        raise ValueError("block_schedule is empty: give at least one phase, such as {size: 32}")
    for number, phase in enumerate(phases[:-1]):
        if phase.until is None:
            raise ValueError(f"block_schedule[{number}] needs `until`: only the last phase may leave it out")
    for scale in (True, False):
        ends = [phase.until for phase in phases if phase.until is not None and (phase.until <= 1) == scale]
        if any(later <= earlier for earlier, later in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"block_schedule: `until` must increase from phase to phase, not {ends}")
