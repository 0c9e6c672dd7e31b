"""Signals at the moments when Python does not hear them: while a run starts, inside DCP, in a rank that waits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from tests.parallel.processes import SECONDS, write_config
from tests.parallel.test_launch import TWO, Group, runs
from tests.training.tiny import config, documents
from unmask import endings
from unmask.processes import launch, meeting
from unmask.runs.open import open_model
from unmask.training.trainer import Trainer


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_while_torch_is_imported_is_one_line(number, name, tmp_path):
    command = [sys.executable, "-m", "unmask", "train", str(write_config(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        over = time.monotonic() + SECONDS
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < over and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (128 + number, "", f"unmask: ended by {name}\n")
    assert not (tmp_path / "run").exists()


def test_processes_that_are_starting_end_when_the_command_is_killed(tmp_path):
    with Group(write_config(tmp_path), *TWO, "training.steps=5000", "parallel.timeout=600") as group:
        ranks = group.until(lambda: len(found := group.ranks()) == 2 and list(found.values()))
        group.agent.kill()
        over = time.monotonic() + SECONDS
        while any(map(runs, ranks)):
            assert time.monotonic() < over
            time.sleep(0.1)
        assert group.ended()[2] == "" and not (tmp_path / "run" / "log.jsonl").exists()


def test_what_a_signal_raises_comes_out_of_dcp(tmp_path, monkeypatch):
    Trainer(config=config(tmp_path, "training.steps=1")).train(documents())

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dcp.FileSystemReader, "read_data", interrupted)
        for act in (lambda: open_model(tmp_path), lambda: Trainer(config=config(tmp_path)).train(documents())):
            with pytest.raises(KeyboardInterrupt):
                act()
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config=config(tmp_path, "training.steps=2")).train(documents())
    assert [each.name for each in tmp_path.glob("*step-*")] == ["step-00000001"]  # nothing half-written stays


def test_only_a_signal_is_unwrapped():
    error = dcp.CheckpointException("read", {0: (ValueError("damaged"), None)})
    assert endings.unwrapped(error) is error
    told = dcp.CheckpointException("read", {0: (ValueError("damaged"), None), 1: (SystemExit(143), None)})
    with pytest.raises(SystemExit, match="143"), endings.passing():
        raise told


@pytest.mark.parametrize(
    "first, code", [("exit 1", 1), ("exit 143", 143), ("kill -TERM $$", -15), ("kill -KILL $$", -9)]
)
def test_a_process_that_does_not_hear_is_killed_soon_after_the_first_has_ended(first, code, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.3)
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    spec = WorkerSpec("unmask", 2, meeting.OneMachine("run"), entrypoint="unused", local_addr=meeting.LOOPBACK)
    agent = launch.Agent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.05; done"],
                            stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    assert deaf.stdout is not None and deaf.stdout.readline() == b"deaf\n"
    ended = subprocess.Popen(["sh", "-c", first], start_new_session=True)
    agent._pcontext = SimpleNamespace(pids=lambda: {0: deaf.pid, 1: ended.pid})
    over = time.monotonic() + SECONDS
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert agent._waiting()
    while agent._waiting():
        assert time.monotonic() < over
        time.sleep(0.02)
    assert agent._first == 1 and deaf.wait() == -signal.SIGKILL and ended.wait() == code
