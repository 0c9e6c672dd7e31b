"""What goes wrong on several processes is one sentence of one process, and never a run that hangs."""

import re
import signal
import subprocess
import sys

import pytest

from tests.parallel.processes import Launched, command, ended, last_step, write_config
from unmask.runs.folder import saved_steps

LONG = "training.steps=5000"


@pytest.mark.parametrize(
    "ranks, overrides, sentence",
    [
        (
            2,
            ["parallel.block_parallel_size=3"],
            "asks for 3 processes, and 2 were started: unmask train --nproc 3",
        ),
        (3, ["parallel.block_parallel_size=3", "data.pack_tokens=2"], "more ranks than tokens in a pack"),
        (2, ["parallel.data_parallel_size=2", "training.batch_size=1"], "raise batch_size to 2"),
        (3, ["parallel.block_parallel_size=3", "parallel.exchange=ulysses"], "4 query and 2 key heads do not divide"),
        (2, ["parallel.block_parallel_size=2", "parallel.exchange=gater"], "did you mean 'gather'"),
        (2, ["parallel.block_parallel_size=2", "model.attention=reference"], "needs whole packs"),
        (2, ["parallel.shard_size=2", "parallel.offload=true"], "parallel.offload=true has no effect on a CPU"),
        (
            2,
            ["parallel.pipeline_stages=2", "parallel.schedule=zbv", "training.batch_size=3"],
            "makes 4 stages with schedule=zbv, and the model has 2 layers",
        ),
        (2, ["parallel.block_parallel_size=2", "parallel.blocks=2"], "unknown key 'parallel.blocks'"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(ranks, overrides, sentence, workers, tmp_path):
    said = refused(workers(ranks), tmp_path, overrides)
    assert sentence in said
    assert not (tmp_path / "run").exists()


def refused(group, folder, overrides, of_rank=None, full_disk=False):
    """The one sentence that all ranks together print."""
    results = group.run(command, str(write_config(folder)), overrides, of_rank or {}, full_disk)
    assert [code for code, _ in results] == [2] * group.size, results
    said = "".join(text for _, text in results)
    assert said.startswith("unmask: ") and said.count("\n") == 1, said
    return said


BLOCKS = ["parallel.block_parallel_size=2"]


@pytest.mark.parametrize(
    "other, difference",
    [
        ("training.seed=1", "training.seed is 1 there and 0 on rank 0"),
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate is 0.5 there and 0.003 on rank 0"),
        ("parallel.placement=context", "parallel.placement is context there and auto on rank 0"),
        ("objective.block_size=4", "objective.block_size is 4 there and 8 on rank 0"),
    ],
)
def test_ranks_with_other_settings_are_named(other, difference, workers, tmp_path):
    said = refused(workers(2), tmp_path, BLOCKS, {1: [other]})
    assert f"rank 1 was started with another configuration: {difference}" in said


def test_data_that_one_rank_lacks(workers, tmp_path):
    said = refused(workers(2), tmp_path, BLOCKS, {1: ["data.train=nowhere.jsonl"]})
    assert "rank 1: data.train=nowhere.jsonl: no such dataset" in said


def test_a_folder_that_cannot_be_written(workers, tmp_path):
    (tmp_path / "file").write_text("")
    said = refused(workers(2), tmp_path, [*BLOCKS, f"checkpoint.path={tmp_path / 'file' / 'run'}"])
    assert "file is not a folder" in said


def test_a_full_disk(workers, tmp_path):
    said = refused(workers(2), tmp_path, [*BLOCKS, "log.console=none"], {}, True)
    assert "No space left on device; there is no earlier checkpoint" in said
    assert saved_steps(tmp_path / "run") == []


@pytest.mark.parametrize("number, victim, ranks", [(signal.SIGKILL, 0, 2), (signal.SIGSTOP, 1, 2)])
def test_a_rank_that_is_lost_is_named(number, victim, ranks, tmp_path):
    loses(write_config(tmp_path), number, victim, ranks)


def loses(config, number, victim, ranks):
    # A process that is killed is seen at once; one that is silent only after the timeout.
    timeout = 60 if number == signal.SIGKILL else 12
    sizes = f"parallel.block_parallel_size={ranks}"
    with Launched(config, ranks, LONG, sizes, f"parallel.timeout={timeout}") as run:
        run.until(3)
        run.processes[victim].send_signal(number)
        codes, _, said = ended([process for rank, process in enumerate(run.processes) if rank != victim], 60)
    assert codes == [2] * (ranks - 1), said
    assert said.splitlines()[-1].startswith("unmask") and said.count("\n") == (4 if victim else 1), (
        said
    )  # rank 0's header
    assert f"rank {victim} no longer answers" in said and "last checkpoint" in said


def test_a_run_that_lost_a_rank_goes_on_and_signals_end_all_ranks_after_one_step_and_save_once(tmp_path):
    """One of three is lost; on two, SIGTERM to one of them, then the same command and Ctrl-C to both."""
    config, run_, sizes = write_config(tmp_path), tmp_path / "run", "parallel.block_parallel_size=2"
    loses(config, signal.SIGKILL, 1, 3)
    for number, who, code in ((signal.SIGTERM, [1], 143), (signal.SIGINT, [0, 1], 130)):
        step = saved_steps(run_)[-1]
        with Launched(config, 2, LONG, sizes, "checkpoint.every=0") as run:
            run.until(max(step, last_step(run_)) + 2)
            for rank in who:
                run.processes[rank].send_signal(number)
            codes, out, err = run.ended()
        assert codes == [code, code], (codes, out, err)
        assert out.count("continue with: unmask train") == 1
        assert err.splitlines()[3:] == [f"resuming from {run_}/step-{step:08d}"]  # after the header
        assert saved_steps(run_)[-1] == last_step(run_) > step


def test_torchrun(tmp_path):
    """The launcher of the documentation, to the end."""
    done = torchrun(tmp_path, "parallel.block_parallel_size=2", "training.steps=3")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("trained 3 steps", done.stdout)) == 1


@pytest.mark.full
def test_torchrun_with_the_wrong_number(tmp_path):
    refused = torchrun(tmp_path, "training.steps=4")
    assert refused.returncode == 1 and refused.stderr.count("unmask: parallel.data_parallel_size=1") == 1


def torchrun(folder, *overrides):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "unmask", "train"]
    return subprocess.run([*start, str(write_config(folder)), *overrides], capture_output=True, text=True, timeout=180)
