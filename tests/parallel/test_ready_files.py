"""The files in launch/: each is run, or held against what its platform asks for."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.parallel import slurm
from tests.parallel.processes import SECONDS, alone, write_config
from tests.parallel.test_launch import losses

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
BLOCKS, STEPS = "parallel.block_parallel_size=2", "training.steps=4"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return losses(alone(tmp_path_factory.mktemp("alone"), STEPS))


def agree(run, whole):
    assert [step for step, *_ in losses(run)] == [step for step, *_ in whole]
    for (_, *mine), (_, *theirs) in zip(losses(run), whole, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_the_batch_script_starts_the_tasks_with_srun(tmp_path):
    script = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "8"}
    given = ["a run.yaml", "training.steps=3"]
    said = subprocess.run(["bash", script, *given], env=environment, capture_output=True, text=True, check=True).stdout
    threads, *line = said.splitlines()
    assert threads == "8" and line == ["--cpus-per-task=8", "--kill-on-bad-exit=1", "unmask", "train", *given]


def test_a_real_slurm_runs_the_batch_script(one_process, tmp_path):
    if (why := slurm.missing()) is not None:
        pytest.skip(why)
    config = write_config(tmp_path)
    with slurm.Slurm(tmp_path / "slurm") as cluster:
        if cluster.why is not None:
            pytest.skip(cluster.why)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        cluster.environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        size = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0"]
        job = ["sbatch", "--wait", *size, f"--output={tmp_path}/job.log", str(LAUNCH / "slurm.sbatch")]
        done = cluster.run(*job, str(config), BLOCKS, STEPS, seconds=120)
    said = (tmp_path / "job.log").read_text()
    assert done.returncode == 0 and said.count("trained 4 steps") == 1, (done.stderr, said)
    agree(tmp_path / "run", one_process)


def test_the_pytorchjob_has_what_the_operator_asks_for():
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    processes = sum(each["replicas"] for each in replicas.values())
    for each in replicas.values():
        assert each["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = each["template"]["spec"]
        [container] = [one for one in pod["containers"] if one["name"] == "pytorch"]
        assert container["image"] and {one["name"] for one in container["volumeMounts"]} == {
            one["name"] for one in pod["volumes"]
        }
        command = [*container["command"], *container["args"]]
        assert command[:2] == ["unmask", "train"] and f"parallel.data_parallel_size={processes}" in command
        mounted = [one["mountPath"] for one in container["volumeMounts"]]
        assert all(any(Path(path).is_relative_to(place) for place in mounted)
                   for path in (command[2], command[-1].partition("=")[2]))  # fmt: skip


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """Runs launch/ray_train.py with these arguments."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'unmask[ray]'")
    folder = tmp_path_factory.mktemp("ray")
    search = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": search, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def of(*arguments):
        command = [sys.executable, str(LAUNCH / "ray_train.py"), str(write_config(folder)), BLOCKS, STEPS, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        return folder / "run", done, shlex.join(command) + done.stdout + done.stderr

    return of


def test_ray_train(ray, one_process, tmp_path):
    run, done, said = ray("--workers", "2", "--storage", str(tmp_path / "ray"))
    assert done.returncode == 0, said
    agree(run, one_process)


@pytest.mark.full
def test_ray_train_with_the_wrong_number(ray):
    _, done, said = ray("--workers", "3")
    assert done.returncode == 1 and "asks for 2 processes, and 3 were started" in done.stderr, said
