"""`unmask train --nproc`: the processes of a run start, end and come back as one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.parallel.processes import SECONDS, command, last_step, write_config
from unmask.cli import main
from unmask.runs.folder import saved_steps

TWO = ["parallel.block_parallel_size=2", "--nproc", "2"]


class Group:
    """`python -m unmask train CONFIG ...`, which starts processes of its own."""

    def __init__(self, config: Path, *arguments: str):
        self.run = config.parent / "run"
        self.agent = subprocess.Popen([sys.executable, "-m", "unmask", "train", str(config), *arguments],
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.agent.terminate()
        try:
            self.agent.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.agent.kill()

    def until(self, found):
        over = time.monotonic() + SECONDS
        while not (value := found()):
            assert time.monotonic() < over and self.agent.poll() is None, self.agent.communicate(timeout=1)
            time.sleep(0.05)
        return value

    def reaches(self, step: int, started: int = 0):
        """Wait until the processes of the start number `started` have logged `step`."""
        self.until(lambda: last_step(self.run) >= step and len(self.restarts()) >= started)

    def restarts(self):
        log = self.run / "log.jsonl"
        records = map(json.loads, log.read_text().splitlines()[:-1] if log.exists() else [])
        return [record for record in records if record["kind"] == "restart"]

    def pid(self, rank: int) -> int:
        return self.until(lambda: self.ranks().get(rank))

    def ranks(self) -> dict[int, int]:
        found = {}
        for child in Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split():
            try:
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            found |= {int(each[5:]): int(child) for each in variables if each.startswith(b"RANK=")}
        return found

    def ended(self):
        """(exit code, stdout, stderr but for the lines of steps)."""
        out, err = self.agent.communicate(timeout=SECONDS)
        return self.agent.returncode, out, "".join(x for x in err.splitlines(True) if not x.startswith("step "))


def kill(group: Group, rank: int, number=signal.SIGKILL):
    os.kill(group.pid(rank), number)


def losses(run: Path) -> list:
    records = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if r["kind"] == "step"]


def test_killed_ranks_come_back_until_the_limit_and_the_losses_are_those_of_a_whole_run(workers, tmp_path):
    """A killed rank comes back; the second one ends the run, and the same command goes on; a signal to a rank ends it
    too, and is no reason to restart; workers bring it to its end."""
    steps = ["training.steps=64", "checkpoint.every=4", "training.threads=1"]
    config, run = write_config(tmp_path), tmp_path / "run"
    with Group(config, *TWO, *steps, "--restarts", "1") as group:
        group.reaches(6)
        kill(group, 1)
        group.reaches(9, started=1)
        kill(group, 0)
        code, _, err = group.ended()
    assert code == 2 and err.count("resuming from") == 1, err
    assert "unmask: rank 1 was killed by SIGKILL; restart 1 of 1, from the last checkpoint\n" in err
    assert err.endswith(
        "unmask: rank 0 was killed by SIGKILL; given up after 1 restart: start it again to resume from the last "
        "checkpoint\n"
    )
    found = [(each["restarts"], each["limit"], each["reason"]) for each in group.restarts()]
    assert found == [(1, 1, "rank 1 was killed by SIGKILL")]

    with Group(config, *TWO, *steps, "--restarts", "3") as group:
        group.reaches(saved_steps(run)[-1] + 5)
        kill(group, 1, signal.SIGTERM)
        code, out, err = group.ended()
    assert code == 143 and err.count("\n") == 4 and err.splitlines()[3].startswith("resuming from"), err
    assert out.count("continue with: unmask train") == 1 and out.endswith("--nproc 2 --restarts 3\n")
    stopped = last_step(run)
    assert saved_steps(run)[-1] == stopped < 64 and len(group.restarts()) == 1

    (tmp_path / "whole").mkdir()
    for each in (config, write_config(tmp_path / "whole")):
        ends = workers(2).run(command, str(each), [TWO[0], *steps], {})
        assert [code for code, _ in ends] == [0, 0], ends
    assert losses(run) == losses(tmp_path / "whole" / "run") and len(losses(run)) == 64


def test_a_signal_to_the_command_saves_once_and_is_no_reason_to_restart(tmp_path):
    with Group(write_config(tmp_path), *TWO, "training.steps=5000", "--restarts", "3") as group:
        group.reaches(3)
        group.agent.send_signal(signal.SIGINT)
        found, out, err = group.ended()
    assert found == 130 and err.count("\n") == 3, (out, err)  # the header
    assert out.count("continue with: unmask train") == 1 and out.endswith("--nproc 2 --restarts 3\n")
    assert saved_steps(tmp_path / "run")[-1] == last_step(tmp_path / "run")


def test_a_signal_while_the_processes_start_ends_all_of_them_at_once(tmp_path):
    with Group(write_config(tmp_path), *TWO, "training.steps=5000") as group:
        group.until(lambda: len(group.ranks()) == 2)
        group.agent.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code, out, _ = group.ended()
    assert code == 143 and time.monotonic() - began < 60, out


def test_processes_save_and_end_when_the_command_is_killed(tmp_path):
    with Group(write_config(tmp_path), "parallel.pipeline_stages=2", "--nproc", "2", "training.steps=5000") as group:
        group.reaches(3)
        processes = group.ranks().values()
        group.agent.kill()
        over = time.monotonic() + SECONDS
        while any(map(runs, processes)):
            assert time.monotonic() < over
            time.sleep(0.1)
        assert saved_steps(group.run)[-1] == last_step(group.run)


def runs(pid):
    """Whether a process is there and not a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_mistake_is_told_once_and_never_tried_again(tmp_path):
    with Group(write_config(tmp_path), *TWO, "data.train=nowhere.jsonl", "--restarts", "3") as group:
        code, out, err = group.ended()
    assert code == 2 and out == "", (out, err)
    assert err.startswith("unmask: data.train=nowhere.jsonl: no such dataset") and err.count("\n") == 1, err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--nproc", "3"], "asks for 1 processes, and 3 were started: unmask train --nproc 1"),
        (["--nproc", "3", "--dry-run"], "asks for 1 processes, and 3 were started: unmask train --nproc 1"),
        (["--nproc", "two"], "--nproc two: give a number of processes, or auto"),
        (["--nproc", "0"], "--nproc 0: give a number of processes, or auto"),
        (["--restarts", "1"], "--restarts is for processes that are started here: give --nproc too"),
        (["--nproc", "1", "--restarts", "1", "checkpoint.every=0"], "resumes from checkpoints: set checkpoint.every"),
        (["--nproc", "1", "--restarts", "1", "checkpoint.resume=false"], "checkpoint.resume=False forbids that"),
        (["--nproc", "1", "--restarts", "1", "checkpoint.step=2"], "checkpoint.step=2 forbids that"),
        (["--nproc", "2", "parallel.block_parallel_size=2", "parallel.speeds=[1]"], "speeds lists 1 ranks"),
    ],
)
def test_what_cannot_be_started_is_refused_before_a_process_is(arguments, sentence, tmp_path, capfd):
    with mock.patch.object(sys, "argv", ["unmask", "train", str(write_config(tmp_path)), *arguments]):
        with pytest.raises(SystemExit) as ended, mock.patch("unmask.processes.launch.launch") as launch:
            main()
    said = capfd.readouterr().err
    assert ended.value.code == 2 and sentence in said and said.count("\n") == 1, said
    assert not launch.called


def test_auto_starts_what_the_axes_multiply_to(tmp_path, capfd):
    asked = ["unmask", "train", str(write_config(tmp_path)), "parallel.data_parallel_size=2", "--nproc", "auto"]
    with mock.patch.object(sys, "argv", [*asked, "--restarts", "1"]):
        with mock.patch("unmask.processes.launch.launch", return_value=0) as launch, pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    assert launch.call_args.args == (["train", asked[2], "parallel.data_parallel_size=2"], 2, 1)
    with mock.patch("torch.cuda.device_count", return_value=4), mock.patch.object(sys, "argv", asked):
        with pytest.raises(SystemExit):
            main()
    assert "asks for 2 processes, and 4 were started" in capfd.readouterr().err
