"""A SLURM of one node on this machine: munged, slurmctld and slurmd, each with its files in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.parallel.workers import free_port

CONFIG = """\
ClusterName=unmask
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no SLURM can be started here, or None."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not installed (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return "SLURM needs two cores for two tasks" if (os.cpu_count() or 1) < 2 else None


class Slurm:
    """`with Slurm(folder) as slurm:` slurm.environment makes sbatch, srun and sinfo talk to it; `why` it is not up."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.why: str | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        settings = {"host": socket.gethostname().split(".")[0], "folder": self.folder, "cores": os.cpu_count()}
        text = CONFIG.format(**settings, controller=free_port(), daemon=free_port())
        (self.folder / "slurm.conf").write_text(text)
        files = [f"--{name.replace('_', '-')}={self.folder}/{file}" for name, file in (
            ("socket", "munge.sock"), ("key_file", "munge.key"), ("pid_file", "munged.pid"),
            ("log_file", "munged.log"), ("seed_file", "munged.seed"))]  # fmt: skip
        self._start("munged", "--foreground", "--force", *files)
        self._wait(lambda: (self.folder / "munge.sock").exists(), "munged")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        self._wait(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T").stdout, "slurmctld and slurmd")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command: str, seconds: float = 10) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=seconds)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("wb") as out:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def _wait(self, ready, what: str) -> None:
        over = time.monotonic() + 30
        while self.why is None and not ready():
            if time.monotonic() > over:
                said = "".join(file.read_text(errors="replace")[-300:] for file in self.folder.glob("*.out"))
                self.why = f"{what} did not start: {said}"
            time.sleep(0.2)
