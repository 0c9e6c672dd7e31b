"""What a user may ask of a sampler."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unmask.config import apply_override, options_error


class Options(BaseModel):
    """Options of every sampler. `Options.parse` turns a mistake into a UserError."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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

    @classmethod
    def read(cls, overrides: list[str]) -> Options:
        """From a command line's `temperature=0.8 steps=4`."""
        tree: dict[str, Any] = {}
        for override in overrides:
            apply_override(tree, override)
        return cls.parse(tree)

    @classmethod
    def parse(cls, options: dict[str, Any]) -> Options:
        try:
            return cls(**options)
        except ValidationError as error:
            raise options_error(error, cls, "sample") from None
