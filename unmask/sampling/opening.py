"""A checkpoint made ready to sample in this process, on the device that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from unmask.errors import UserError
from unmask.hardware import default_device
from unmask.models.families import family_of_model
from unmask.runs.open import OpenModel, open_model
from unmask.sampling.options import Options
from unmask.sampling.presets import PRESETS
from unmask.sampling.session import Session
from unmask.terminal import say


def refuse_several(what: str, hint: str = "") -> None:
    """UserError in one of several processes, for `what` runs in one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{what} runs in one process: start it without torchrun{hint}")


def opened(checkpoint: str | Path, options: Options) -> OpenModel:
    """The checkpoint's model, on the GPU if there is one; what should be known of it goes to stderr."""
    device = default_device()
    found = open_model(checkpoint, device=device, mask_token_id=options.mask_token_id, objective=options.trained_by())
    for note in found.notes:
        say(note, file=sys.stderr)
    return found


def session(checkpoint: str | Path, overrides: list[str]) -> Session:
    """The checkpoint, ready to sample with these options; those of its family are told on stderr."""
    refuse_several("sample", ", a part of the prompts each if need be")
    options = Options.read(overrides)
    found = opened(checkpoint, options)
    return Session(found.model, found.tokenizer, as_published(options, found), found.objective.decoding)


def as_published(options: Options, opened: OpenModel) -> Options:
    """The options, for a model of a family with the preset of its authors unless they say how to decode; says so.

    A model that was trained here to be decoded in another way than its family is not.
    """
    preset, kind = family_of_model(opened.model).preset, opened.objective.decoding.kind
    if preset is None or PRESETS[preset]["method"] != kind:
        return options
    chosen = options.of_family(preset)
    if chosen is not options:
        settings = " ".join(f"{name}={str(getattr(chosen, name)).lower()}" for name in PRESETS[preset])
        say(f"sampling as {preset} is published ({settings}); --as none for the defaults", file=sys.stderr)
    return chosen
