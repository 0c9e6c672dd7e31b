"""What `unmask prepare` does: a tokeniser found or trained, the source read with progress, what came of it in words."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.data.dataset import Manifest
from unmask.data.prepare import Report, prepare, source_tokenizer
from unmask.errors import UserError, counted
from unmask.terminal import say


@dataclass(frozen=True)
class Prepared:
    """A dataset that was written, and the seconds it took, without those of training its tokeniser."""

    path: Path
    manifest: Manifest
    seconds: float

    def facts(self) -> dict[str, Any]:
        """The manifest's figures as plain values, for JSON."""
        manifest = self.manifest.model_dump(mode="json", exclude={"files"})
        return {"path": str(self.path), **manifest, "seconds": round(self.seconds, 3)}

    def sentence(self) -> str:
        found = self.manifest
        partly = f" ({found.supervised:,} of them supervised)" if found.supervised < found.tokens else ""
        skipped = f", skipped {found.skipped:,} bad" if found.skipped else ""
        return f"{self.path}: {counted(found.documents, 'document')}, {counted(found.tokens, 'token')}{partly}{skipped}"


def run(
    source: str,
    output: Path,
    tokenizer: tuple[str | None, int | None],
    force: bool,
    read: dict[str, Any],
    report: Report,
) -> Prepared:
    """Prepare, and name on stderr the bad records that were left out.

    tokenizer: a path, or the size of one to train; read: the fields of `Reading`, and `field`: "text=content", ...
    """
    path, size = tokenizer
    if path is not None and size is not None:
        raise UserError("give --tokenizer (one that exists) or --train-tokenizer (a size), not both")
    options = {**read, "fields": dict(map(_field, read["field"] or []))}
    del options["field"]
    options["bos"] = "auto" if options["bos"] is None else options["bos"]
    chosen = path if size is None else source_tokenizer(source, size, report=report, **options)
    start = time.perf_counter()
    manifest = prepare(source, output, chosen, force=force, report=report, **options)
    seconds = time.perf_counter() - start
    for example in manifest.examples:
        say(f"unmask: skipped {example}", file=sys.stderr)
    return Prepared(output, manifest, seconds)


def _field(text: str) -> tuple[str, str]:
    name, _, column = text.partition("=")
    if not (name and column):
        raise UserError(f"--field {text!r} is not of the form NAME=COLUMN, such as text=content")
    return name, column
