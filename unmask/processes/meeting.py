"""Where the processes of a run meet: a store that listens on the address it is given, and on no other.

torch's own TCPStore listens on every interface, without a password, and torchelastic's c10d rendezvous unpickles what
it finds there: whoever reaches the port can run code in the launcher. Processes of one machine need neither.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"


def listening(host: str, port: int = 0, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """A store that this process keeps for the others, at `host` alone; port 0 takes a free one. OSError if taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=512) as server:
        port = server.getsockname()[1]
        # The store closes what it listens on.
        return dist.TCPStore(host, port, None, True, timeout, False, master_listen_fd=server.detach())


def joined(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) of a process that a launcher has started, by torchrun's variables.

    The first rank keeps the store, unless a launcher does. A MASTER_ADDR that is an address is all that it listens on;
    a name may stand for another address elsewhere, and has torch listen on all.
    """
    own = os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    address = _address(os.environ.get("MASTER_ADDR", "")) if own else None
    if address is None:
        return next(dist.rendezvous("env://", timeout=timeout))
    try:
        store = listening(address, int(os.environ["MASTER_PORT"]), timeout)
    except OSError as error:
        raise RuntimeError(f"{address}:{os.environ['MASTER_PORT']}: {error.strerror}") from error
    return store, 0, int(os.environ["WORLD_SIZE"])


def _address(host: str) -> str | None:
    if host == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


class OneMachine(RendezvousHandler):
    """The rendezvous of torchelastic's agent with itself: nobody else can join, so there is nothing to negotiate."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._store = listening(LOOPBACK)

    @property
    def use_agent_store(self) -> bool:
        """The processes use this store too, over restarts."""
        return True

    def get_backend(self) -> str:
        return "one machine"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent is the first of one, in every round."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody waits for it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
