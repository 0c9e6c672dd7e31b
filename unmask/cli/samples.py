"""What `unmask sample` prints of prompts: a live view in a terminal, texts or token ids, JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from unmask.cli.progress import steps
from unmask.errors import UserError
from unmask.sampling import opening
from unmask.sampling.api import Sample, pieces, result
from unmask.sampling.canvas import Fill
from unmask.sampling.display import live
from unmask.sampling.prompts import Asked
from unmask.sampling.session import Session, Work
from unmask.terminal import say


def run(
    checkpoint: Path,
    overrides: list[str],
    wanted: Sequence[Asked],
    *,
    stream: bool = False,
    as_json: bool = False,
) -> bool:
    """Sample, print what was given with what it was filled with, and return whether Ctrl-C ended it.

    as_json: a line for each sample, with the new tokens alone and what they took. Token ids are printed where something
    was given so, and where the model has no tokeniser. stream: print finished blocks of a single sample at once.
    """
    session = opening.session(checkpoint, overrides)
    single = len(wanted) * session.options.num_samples == 1
    if stream and (as_json or not single):
        raise UserError("--stream prints the text of one sample as it is written; for several, or JSON, leave it out")
    names = [one.where for one in wanted] if wanted[0].where else []
    works = session.works([one.prompt for one in wanted], [one.suffix for one in wanted], names)
    console = Console(stderr=True, highlight=False)
    watching = single and console.is_terminal and not as_json and session.tokenizer is not None
    if stream and not (watching and sys.stdout.isatty()):
        return _stream(session, works[0], wanted[0])
    if single:
        view: Any = live(session.tokenizer, console) if watching else nullcontext(lambda canvas: None)
        with view as report:
            [work] = next(session.batches(works, report))
        _print(session, work, wanted[0], as_json, sys.stdout)
        if work.interrupted and not as_json:
            say("interrupted", file=sys.stderr)
        return work.interrupted
    # Where results go to a terminal, they are the progress.
    bar = nullcontext(lambda done, total: None) if sys.stdout.isatty() else steps("sampling", "texts")
    # A bar takes hold of sys.stdout while it is up, and would put what is printed to stderr.
    out, done = sys.stdout, 0
    with bar as report:
        for batch in session.batches(works):
            for work in batch:
                if not as_json:
                    say(_heading(work, len(wanted), session.options.num_samples), file=out)
                _print(session, work, wanted[work.prompt], as_json, out)
            done += len(batch)
            report(done, len(works))
            if any(work.interrupted for work in batch):
                return True
    return False


def _heading(work: Work, prompts: int, samples: int) -> str:
    parts = [f"prompt {work.prompt + 1}"] if prompts > 1 else []
    return f"--- {', '.join([*parts, *([f'sample {work.number + 1}'] if samples > 1 else [])])} ---"


def _print(session: Session, work: Work, given: Asked, as_json: bool, out: TextIO) -> None:
    found = result(session, work)
    if as_json:
        say(json.dumps(facts(found, given)), file=out, flush=True)
    elif given.texts and session.tokenizer is not None:
        say("".join(given.around([hole.text for hole in found.holes])), file=out, flush=True)
    else:
        parts = given.around([hole.token for hole in found.holes])
        say(*(token for part in parts for token in part), file=out, flush=True)


def facts(found: Sample, given: Asked) -> dict[str, Any]:
    """A sample as plain values, for JSON."""
    known = {**answer(found), "prompt": found.prompt, "sample": found.number}
    if isinstance(given.prompt, Fill):
        known["holes"] = [{"text": hole.text, "tokens": hole.token} for hole in found.holes]
    return known


def answer(found: Sample) -> dict[str, Any]:
    """What was written, and what it took, as plain values."""
    return {"text": found.text, "tokens": found.token, "passes": found.passes, "interrupted": found.interrupted}


def _stream(session: Session, work: Work, given: Asked) -> bool:
    """Print what is given as it is, and every finished block as it comes."""
    texts, begun = given.texts and session.tokenizer is not None, False
    try:
        for part in _parts(session, work, given, texts):
            text = part if texts else " ".join(map(str, part))
            say(" " if begun and text and not texts else "", text, sep="", end="", flush=True)
            begun = begun or bool(text)
    except KeyboardInterrupt:
        say("\ninterrupted", file=sys.stderr)
        return True
    finally:
        print(flush=True)
    return False


def _parts(session: Session, work: Work, given: Asked, texts: bool) -> Iterator[Any]:
    """Texts, or token ids, in their order: what is given, and what is written between as soon as it is."""
    parts = given.around([None] * len(work.canvas.holes))
    holes = [place for place, part in enumerate(parts) if part is None]
    yield from parts[: holes[0]]
    after = holes[0]
    for piece in pieces(session, work):
        yield from filter(None, parts[after : holes[piece.hole]])
        after = holes[piece.hole] + 1
        yield piece.text if texts else piece.token
    yield from filter(None, parts[after:])
