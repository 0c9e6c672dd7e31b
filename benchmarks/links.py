"""Network namespaces with links of a known rate: several machines on one, for measuring what a network costs.

Ranks are joined by a bridge in a namespace of its own. Every end is shaped by a token bucket (tbf) in both directions.
Needs Linux, root and Debian's iproute2; `missing()` says what is not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid

INTERFACE = "link0"


def missing() -> str | None:
    """Why no links can be made here, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (iproute2) are not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = f"unmask-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "delete", trial)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Links:
    """`with Links(4) as links:` ranks run behind links.command(rank); `rate(megabits)` shapes every link."""

    def __init__(self, size: int):
        self.size = size
        self.names = [f"unmask-{uuid.uuid4().hex[:6]}-{rank}" for rank in range(size)]
        self.bridge = f"unmask-{uuid.uuid4().hex[:6]}-b"

    def __enter__(self) -> Links:
        try:
            for name in [*self.names, self.bridge]:
                _ip("netns", "add", name)
            _ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.bridge, "link", "set", "br0", "up")
            for rank, name in enumerate(self.names):
                port = f"port{rank}"
                _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self.bridge)
                _ip("-n", name, "addr", "add", f"10.73.0.{rank + 1}/24", "dev", INTERFACE)
                for device in ("lo", INTERFACE):
                    _ip("-n", name, "link", "set", device, "up")
                _ip("-n", self.bridge, "link", "set", port, "master", "br0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in [*self.names, self.bridge]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def rate(self, megabits: float | None) -> None:
        """Shape every rank's link, in both directions; None takes the limit off."""
        ends = [(name, INTERFACE) for name in self.names]
        ends += [(self.bridge, f"port{rank}") for rank in range(self.size)]
        for name, device in ends:
            if megabits is None:
                subprocess.run(["tc", "-n", name, "qdisc", "delete", "dev", device, "root"], capture_output=True)
                continue
            shape = ["tbf", "rate", f"{megabits:.3f}mbit", "burst", "64kb", "limit", "20mb"]
            command = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape]
            subprocess.run(command, check=True, capture_output=True)

    def command(self, rank: int) -> list[str]:
        """What to put before a rank's command."""
        return ["ip", "netns", "exec", self.names[rank]]
