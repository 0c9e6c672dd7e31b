"""The processes of a run as torch.distributed's default group, and what is said when one of them is lost."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from unmask.errors import RankLost, UserError
from unmask.processes import launched
from unmask.processes.meeting import joined
from unmask.processes.pulse import Pulse

#: What torch says when the other end of a collective is gone or silent.
CONNECTION = ("onnection", "imed out", "imeout", "peer", "NCCL", "gloo", "Socket")


def world_size() -> int:
    """How many processes were started together; 1 without a launcher."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def initialised(device: torch.device, seconds: float) -> Iterator[Pulse]:
    """torch.distributed from the launcher's environment, for as long as the block lasts. seconds: of its timeout."""
    timeout = timedelta(seconds=seconds)
    try:
        store, rank, size = joined(timeout)
        if launched.by_unmask():  # torchelastic keeps the store, and what is in it, over restarts
            store = dist.PrefixStore(f"start {launched.restarts()[0]}", store)
        store.set_timeout(timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"parallel: the processes did not find each other: {first_line(error)}") from error
    try:
        yield Pulse(store, rank, size)
    finally:
        dist.destroy_process_group()


@contextmanager
def naming(pulse: Pulse | None, rank: int) -> Iterator[None]:
    """The loss of another process becomes a UserError that names it, and of all processes one tells it.

    A process that ends by a mistake of its own says so to the others, which then have nothing to add.
    """
    try:
        yield
    except RuntimeError as error:
        raise lost(pulse, error) from error
    except UserError as error:
        if error.told is None and pulse is not None:
            error.told = pulse.verdict([rank])[1]
        raise
    except OSError:
        if pulse is not None:
            pulse.verdict([rank])
        raise


def lost(pulse: Pulse | None, error: RuntimeError) -> Exception:
    """A UserError where the cause of `error` is another process that is gone or silent, else the error itself."""
    text = first_line(error)
    if not any(sign in text for sign in CONNECTION):
        return error
    silent, told = pulse.verdict() if pulse is not None else ([], False)
    who = "rank " + " and ".join(map(str, silent)) if silent else "a rank"
    count, limit = launched.restarts()
    # Advice on what a launcher does, or says, by itself would mislead.
    manual = count == limit and not launched.by_unmask()
    advice = "; look at its messages, and start all ranks again to resume from the last checkpoint" if manual else ""
    return RankLost(f"{who} no longer answers, so the others stopped ({text}){advice}", told=told)


def first_line(error: BaseException) -> str:
    """What went wrong, without the place in somebody's source and the advice around it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.\w+:\d+\] ", "", line).split(". ")[0]
