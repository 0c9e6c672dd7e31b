"""The entry point: signals, exit codes, and how a mistake is told.

What a user did wrong is one line on stderr and exit code 2; a run ended by a signal exits with 128 + its number.
Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import os
import sys
import time

from unmask.cli import complete
from unmask.cli.app import app
from unmask.endings import Ending, sentence
from unmask.errors import UserError, disk_refusal
from unmask.processes import launched
from unmask.terminal import say

#: Seconds that a process stays whose mistake another one tells.
LINGER = 5.0


def main() -> None:
    """Entry point of the `unmask` command."""
    # Threads that sleep between parallel regions, not spin: 2 % slower alone, ten times faster on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch remarks, once per rank, that all parameters have been used.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    complete.answer_shells()
    launched.adopt_slurm(os.environ)
    ending = Ending(launched.by_launcher(), launched.BEGUN.is_set)
    try:
        for argument in sys.argv[1:]:
            if not argument.isprintable() and any("\udc80" <= character <= "\udcff" for character in argument):
                raise UserError(f"the argument {argument!r} is not UTF-8 text")
        with ending.watching():
            app()
    except BaseException as error:
        if ending.number is not None:  # whatever a library made of it
            if launched.rank() == 0 and not launched.by_unmask():
                say(sentence(ending.number), file=sys.stderr)
            sys.exit(128 + ending.number)
        _fail(error)


def _fail(error: BaseException) -> None:
    """End as `error` asks for: a mistake of the user in one line, a bug with its traceback."""
    try:
        raise error
    except UserError as error:
        _tell(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # a disk that is full or read-only, a file without permission
        refusal = disk_refusal(error)
        if refusal is None:
            raise
        file = getattr(error, "filename", None)
        _tell(UserError(f"{file}: {refusal}" if file else refusal, told=False))
        sys.exit(2)


def _tell(error: UserError) -> None:
    """Print what went wrong, unless another process or the launcher does."""
    if launched.by_unmask():
        launched.record(error)
        return
    # Before the processes have met, those of one machine see the same mistake.
    told = int(os.environ.get("LOCAL_RANK", "0")) > 0 if error.told is None else error.told
    if told:  # a launcher ends all processes with the first that ends: let the one that speaks speak
        time.sleep(LINGER)
    else:
        rank = launched.rank()
        say(f"unmask: {error}" if rank == 0 else f"unmask (rank {rank}): {error}", file=sys.stderr)
