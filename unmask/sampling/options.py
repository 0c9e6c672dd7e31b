"""What a user may ask of a sampler."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from unmask.config import Section, apply_override
from unmask.errors import UserError


class Options(Section):
    """Options of every sampler."""

    model_config = ConfigDict(frozen=True)

    #: Tokens to generate, or the size of the hole to fill.
    length: int = Field(default=128, ge=1)
    #: Sampler by name; empty: the one of the decoding kind the model was trained for.
    method: str | None = None
    #: Tokens denoised together; empty: the model's block size, or (`full`) everything at once.
    block_size: int | None = Field(default=None, ge=1)
    #: Commit every token whose probability exceeds this, always at least one (Fast-dLLM); 1 turns it off.
    threshold: float = Field(default=0.9, ge=0, le=1)
    #: Denoising steps per block: at least masks / steps tokens are committed in each (LLaDA; with a threshold, SDAR).
    steps: int | None = Field(default=None, ge=1)
    #: 0 takes the most probable token.
    temperature: float = Field(default=0.0, ge=0)
    #: Draw from the smallest set of tokens with this much probability.
    top_p: float = Field(default=1.0, gt=0, le=1)
    #: Of every random draw.
    seed: int = Field(default=0, ge=0, lt=2**63)

    def refuse_unused(self, method: str) -> None:
        """UserError for an option that plays no part in this sampling; of a sampler of one's own nothing is known."""
        needs = {}
        if method == "causal":
            needs = dict.fromkeys(("block_size", "threshold", "steps"), "a sampler that fills masks, not method=causal")
        if self.temperature == 0:
            needs["top_p"] = "a temperature above 0"
        for option, need in needs.items():
            value = getattr(self, option)
            if value != type(self).model_fields[option].default:
                raise UserError(f"sample: {option}={value!r} has no effect here: it needs {need}")

    @classmethod
    def read(cls, overrides: list[str]) -> Options:
        """From a command line's `temperature=0.8 steps=4`."""
        tree: dict[str, Any] = {}
        for override in overrides:
            apply_override(tree, override, "option=value", "length=64")
        return cls.parse(tree, "sample")
