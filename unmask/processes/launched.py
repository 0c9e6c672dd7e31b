"""How this process was started: what torchrun, SLURM's srun or `unmask train --nproc` say in its environment.

torchrun's variables are the common language: Kubernetes' PyTorchJob sets them, Ray Train does, and SLURM's are put into
it here. https://docs.pytorch.org/docs/stable/elastic/run.html, https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
from collections.abc import MutableMapping

from unmask.endings import DEAF

#: torchelastic's name for the processes that `unmask train --nproc` starts.
ROLE = "unmask"
#: Ports that a SLURM step may take to meet: below those that systems give to clients.
PORTS = range(10000, 30000)
#: Set once this process trains, and so answers signals between its steps.
BEGUN = threading.Event()


def rank() -> int:
    """The number of this process among those that a launcher started together."""
    return int(os.environ.get("RANK", "0"))


def by_launcher() -> bool:
    """Whether something started this process as one of several."""
    return "RANK" in os.environ


def by_unmask() -> bool:
    """Whether `unmask train --nproc` did, which tells the user what its processes record."""
    return by_launcher() and os.environ.get("ROLE_NAME") == ROLE


def run_id() -> str:
    """A name for a run that this process launches, by which those that it starts know it."""
    return f"{os.getpid()}-{uuid.uuid4().hex}"


def end_with_launcher(every: float = 0.5) -> None:
    """Let this process save and end, as if told to, when the `unmask train --nproc` that started it is gone.

    One that has not begun to train has nothing to save, and may wait for the others where it hears no signal.
    """
    if not by_unmask():
        return
    launcher = int(os.environ["TORCHELASTIC_RUN_ID"].partition("-")[0])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(every)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(DEAF)
        if not BEGUN.is_set():
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def restarts() -> tuple[int, int]:
    """(how often torchelastic has started the group again, how often it may)."""
    return (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
    )


def options() -> list[str]:
    """The options of `unmask train` that started this group."""
    if not by_unmask():
        return []
    limit = restarts()[1]
    return [f"--nproc {os.environ['WORLD_SIZE']}", *([f"--restarts {limit}"] if limit else [])]


def record(error: Exception) -> None:
    """Leave the error where torchelastic's agent looks for the cause of a failure."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Put what srun says into torchrun's words, unless they are there already. A batch script itself is no task."""
    size = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environment or size == 1 or "SLURM_PROCID" not in environment:
        return
    nodes = hosts(environment["SLURM_STEP_NODELIST"])
    job, step = (int(environment.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
    environment["RANK"], environment["LOCAL_RANK"] = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = str(size)
    environment.setdefault("MASTER_ADDR", "127.0.0.1" if len(nodes) == 1 else nodes[0])
    # Steps that run at the same time on one machine need ports of their own.
    environment.setdefault("MASTER_PORT", str(PORTS[(job * 31 + step) % len(PORTS)]))


def hosts(nodes: str) -> list[str]:
    """The hosts of a SLURM node list: `node[01-03,07],gpu1` is node01, node02, node03, node07, gpu1."""
    return [host for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes) for host in _expanded(part)]


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return [before + number + end for number in numbers for end in _expanded(after)]
