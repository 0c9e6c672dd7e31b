"""What `unmask sample` does: open the checkpoint, sample with a live view in a terminal, print the text."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from unmask.models.checkpoints import open_model
from unmask.sampling.api import Sample, sample
from unmask.sampling.display import live
from unmask.sampling.options import Options


def run(checkpoint: Path, overrides: list[str], prompt: str, suffix: str | None, as_json: bool) -> Sample:
    """Print prompt, answer and suffix (as JSON: the answer alone, and what it took), and return the sample."""
    import torch
    from rich.console import Console

    options = Options.read(overrides)
    opened = open_model(checkpoint, device="cuda" if torch.cuda.is_available() else "cpu")
    console = Console(stderr=True, highlight=False)
    watching = console.is_terminal and not as_json and opened.tokenizer is not None
    view: Any = live(opened.tokenizer, console) if watching else nullcontext()
    with view as report:
        result = sample(
            opened.model,
            opened.tokenizer,
            prompt,
            suffix=suffix,
            decoding=opened.objective.decoding,
            report=report,
            **options.model_dump(),
        )
    if as_json:
        facts = {"text": result.text, "tokens": result.token, "passes": result.passes}
        print(json.dumps(facts | {"interrupted": result.interrupted}))
    else:
        print(prompt + result.text + (suffix or ""))
    if result.interrupted and not as_json:
        print("interrupted", file=sys.stderr)
    return result
