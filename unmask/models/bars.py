"""transformers' own progress bars, in terminals only: in a log they are noise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bars_in_terminals_only() -> Iterator[None]:
    """Within the context transformers shows no progress bar unless stderr is a terminal."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
