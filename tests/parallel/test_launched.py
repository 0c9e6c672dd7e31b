"""SLURM's environment as srun sets it, put into torchrun's words."""

import pytest

from unmask.processes.launched import PORTS, adopt_slurm, hosts


@pytest.mark.parametrize(
    "nodes, found",
    [
        ("localhost", ["localhost"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("login1,node[9-11]", ["login1", "node9", "node10", "node11"]),
        ("gpu-a[001,010-012].site,cpu2", ["gpu-a001.site", "gpu-a010.site", "gpu-a011.site", "gpu-a012.site", "cpu2"]),
        ("rack[1-2]n[08-09]", ["rack1n08", "rack1n09", "rack2n08", "rack2n09"]),
    ],
)
def test_node_lists(nodes, found):
    assert hosts(nodes) == found


#: Of task 5 of `srun --nodes 4 --ntasks 8`, as Slurm 22.05 sets it.
STEP = {
    "SLURM_JOB_ID": "81234",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "node[02-04,07]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def adopted(**changes):
    environment = {**STEP, **changes}
    adopt_slurm(environment)
    return {name: environment.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def test_a_task_of_srun_learns_its_place():
    found = adopted()
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node02"}
    assert int(port) in PORTS and port == adopted(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")["MASTER_PORT"]
    assert port != adopted(SLURM_STEP_ID="3")["MASTER_PORT"] != adopted(SLURM_JOB_ID="81235")["MASTER_PORT"]


def test_what_the_user_or_torchrun_says_wins():
    assert adopted(RANK="0", MASTER_ADDR="first")["WORLD_SIZE"] is None
    found = adopted(MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    assert (found["RANK"], found["MASTER_ADDR"], found["MASTER_PORT"]) == ("5", "10.0.0.1", "1234")
    assert adopted(SLURM_STEP_NODELIST="node07")["MASTER_ADDR"] == "127.0.0.1"


def test_a_batch_script_and_a_single_task_stay_alone():
    batch = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP")}
    adopt_slurm(batch)
    assert "RANK" not in batch
    assert adopted(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")["RANK"] is None
