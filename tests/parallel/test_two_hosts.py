"""Two machines, each a network namespace with an address of its own, under torchrun as docs/launching.md has it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import links
from tests.parallel.processes import alone, write_config
from tests.parallel.test_launch import SECONDS, Group, losses
from tests.parallel.test_ready_files import agree

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["training.steps=12", "checkpoint.every=4"]
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": links.INTERFACE,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}  # fmt: skip


class Host(Group):
    """torchrun on one of the hosts. Both have the machine's name, so that each is told who keeps the rendezvous."""

    def __init__(self, net: links.Links, number: int, config: Path):
        self.run = config.parent / "run"
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "run1", "--rdzv-endpoint", "10.73.0.1:29500"]
        rendezvous += ["--rdzv-conf", f"is_host={1 - number}", "--local-addr", f"10.73.0.{number + 1}"]
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
        run = ["-m", "unmask", "train", str(config), "parallel.block_parallel_size=2", *STEPS]
        command = [*net.command(number), sys.executable, *torchrun, *rendezvous, *run]
        self.agent = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      text=True)  # fmt: skip


def test_a_host_that_is_lost_and_comes_back_changes_nothing(tmp_path):
    if (why := links.missing()) is not None:
        pytest.skip(why)
    config = write_config(tmp_path)
    with links.Links(2) as net, Host(net, 0, config) as first:
        with Host(net, 1, config) as second:
            second.reaches(6)
            worker = second.ranks()  # of torchrun's only process
            for pid in (second.agent.pid, *worker.values()):
                os.kill(pid, signal.SIGKILL)
        with Host(net, 1, config) as second:
            ends = [each.agent.communicate(timeout=SECONDS) for each in (first, second)]
        assert [first.agent.returncode, second.agent.returncode] == [0, 0], ends
    assert sum(out.count("trained 12 steps") for out, _ in ends) == 1
    assert "no longer answers" in ends[0][1] + ends[1][1] and len(losses(tmp_path / "run")) == 12
    agree(tmp_path / "run", losses(alone(tmp_path / "alone", *STEPS)))
