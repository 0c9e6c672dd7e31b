"""transformers' own progress bars, in terminals only: in a log they are noise, in a view of ours they tear it apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial


def bars_in_terminals_only() -> AbstractContextManager[None]:
    """Within the context transformers shows no progress bar unless stderr is a terminal."""
    return nullcontext() if sys.stderr.isatty() else no_bars()


@contextmanager
def no_bars() -> Iterator[None]:
    """Within the context transformers shows no progress bar."""
    from transformers import modeling_gguf_pytorch_utils as of_gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), of_gguf.tqdm
    logging.disable_progress_bar()
    of_gguf.tqdm = partial(bar, disable=True)  # this one asks nobody
    try:
        yield
    finally:
        of_gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()
