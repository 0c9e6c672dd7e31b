"""What `unmask sample` does: open the checkpoint, sample with a live view in a terminal, print the text or its ids."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.models.checkpoints import open_model
from unmask.sampling.api import Sample, sample
from unmask.sampling.display import live
from unmask.sampling.options import Options

#: A text, or token ids.
Given = str | list[int]


def ends(prompt: tuple[str, str | None], suffix: tuple[str | None, str | None]) -> tuple[Given, Given | None]:
    """Prompt and suffix from the command line's (text, token ids like "1 2 3") of each; both texts, or both ids."""
    if prompt[1] is None and suffix[1] is None:
        return prompt[0], suffix[0]
    if prompt[0] or suffix[0]:
        raise UserError("give prompt and suffix as text (--prompt, --suffix) or as ids (--prompt-ids, --suffix-ids)")
    return _ids("--prompt-ids", prompt[1] or ""), None if suffix[1] is None else _ids("--suffix-ids", suffix[1])


def _ids(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise UserError(f'{option} {text!r}: write token ids, whole numbers such as "1 2 3"') from None


def run(checkpoint: Path, overrides: list[str], prompt: Given, suffix: Given | None, as_json: bool) -> Sample:
    """Print prompt, answer and suffix (as JSON: the answer alone, and what it took), and return the sample.

    Token ids are printed where the prompt or the suffix is given so, and where the model has no tokeniser.
    """
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
    elif isinstance(prompt, str) and not isinstance(suffix, list) and opened.tokenizer is not None:
        print(prompt + result.text + (suffix or ""))
    else:
        print(*prompt, *result.token, *(suffix or []))
    if result.interrupted and not as_json:
        print("interrupted", file=sys.stderr)
    return result
