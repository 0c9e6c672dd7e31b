"""Every way to start that is ours listens on the loopback interface only, or on nothing."""

import os
import socket
import struct
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.parallel.processes import write_config
from tests.parallel.test_launch import TWO, Group
from unmask.processes import meeting

LISTENING = "0A"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listened(pids) -> set[str]:
    """The addresses on which these processes accept connections, as /proc has them."""
    inodes = set()
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(each) if each.is_symlink() else ""
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                words = [fields[1].partition(":")[0][i : i + 8] for i in range(0, len(fields[1].partition(":")[0]), 8)]
                found.add(socket.inet_ntop(family, b"".join(struct.pack("=I", int(word, 16)) for word in words)))
    return found


def test_processes_of_one_machine_listen_on_loopback_only(tmp_path):
    with Group(write_config(tmp_path), *TWO, "training.steps=5000") as group:
        group.reaches(2)
        ranks = list(group.ranks().values())
        assert len(ranks) == 2
        assert listened([group.agent.pid]) == {"127.0.0.1"}
        found = listened([group.agent.pid, *ranks])
        assert found and found <= LOOPBACK, found


def test_a_process_alone_listens_on_nothing(tmp_path):
    from tests.training.tiny import config, documents
    from unmask.training.trainer import Trainer

    before = listened([os.getpid()])
    during = []
    Trainer(config=config(tmp_path, "training.steps=2"), callbacks=[lambda *_: during.append(listened([os.getpid()]))]
            ).train(documents())  # fmt: skip
    assert during == [before, before]


def test_the_store_of_the_first_rank_listens_on_the_address_that_is_given(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    before = listened([os.getpid()])
    store, rank, size = meeting.joined(timedelta(seconds=20))
    assert (rank, size) == (0, 1) and listened([os.getpid()]) - before <= {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=20))
    client.set("key", "value")
    assert store.get("key") == b"value"
