"""Nodes with unequal GPUs, and jobs with two kinds of nodes. The GPUs are device files that Slurm hands out: simulated."""

import json
import re

import pytest

from tests.lab.user import JOB, make_model
from tests.slurm.cluster import SlurmLab

pytestmark = pytest.mark.timeout(600)
SHORT = JOB.replace("steps: 400", "steps: 20")
SEES = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "is local", os.environ["LOCAL_RANK"], "and sees",
      os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
UNEQUAL = {"options": ["--gpus=3"]}
TWO_KINDS = {
    "nodes": 1,
    "gpus_per_node": "fake:2",
    "components": [{"nodes": 1, "gpus_per_node": "fake:1", "cpus_per_node": 2}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_cluster():
    with SlurmLab(3, gpus={"n0": 2, "n1": 1}, ttl_s=1800) as lab:
        yield lab


def lines_of(account, keys):
    """What every rank printed of itself."""
    account.desk.write("project/sees.py", SEES)
    account.describes(**keys)
    account.types("run", "--detach", "--dir", "project", "--", "sees.py")
    run = account.newest()
    assert account.awaits_phase(run, "finished", "failed")["phase"] == "finished", account.log_of(run)
    account.leaves_nothing()
    return sorted(re.findall(r"rank \d+ of .*", account.types("logs", run).stdout))


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        pytest.param({"nodes": 1, "gpus_per_node": "fake:2", "gpus_by": "gres"}, [(0, "0,1"), (1, "0,1")], id="gres"),
        pytest.param({"nodes": 1, "gpus_per_node": 2}, [(0, "0,1"), (1, "0,1")], id="gpus-per-node"),
        pytest.param(UNEQUAL, [(0, "0,1"), (1, "0,1"), (0, "0")], id="unequal"),
        pytest.param(TWO_KINDS, [(0, "0,1"), (1, "0,1"), (0, "0")], id="two-kinds"),
    ],
)
def test_every_gpu_that_slurm_gives_has_a_rank_that_sees_it(account, keys, ranks):
    assert lines_of(account, keys) == [
        f"rank {rank} of {len(ranks)} is local {local} and sees {gpus}" for rank, (local, gpus) in enumerate(ranks)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [pytest.param(UNEQUAL, id="unequal"), pytest.param(TWO_KINDS, id="two-kinds")])
def test_a_run_trains_on_nodes_with_unequal_gpus(account, model, keys):
    run = account.trains(model, job=SHORT, **keys)
    row = account.awaits_phase(run, "finished", "failed")
    assert row["phase"] == "finished", account.log_of(run)
    assert row["step"] == 20
    gang = json.loads(account.desk.check(["sh", "-c", f"cat .gangline/runs/{run}/attempts/1/gang.json"]))
    assert [rank["host"] for rank in gang["ranks"]] == ["n0", "n0", "n1"]
    account.leaves_nothing()


@pytest.mark.slow
def test_a_run_on_two_kinds_of_nodes_is_stopped_resumed_and_cancelled(account, model):
    run = account.trains(model, job=JOB.replace("steps: 400", "steps: 100000"), **TWO_KINDS)
    before = account.awaits_step(run, 10)["step"]
    account.types("stop", run)
    assert account.row(run)["phase"] == "stopped"
    account.leaves_nothing()
    account.types("resume", run, "--detach")
    account.awaits(run, lambda row: row["phase"] == "running" and (row["step"] or 0) > before, "more steps")
    account.lab.login.check(["scancel", account.job_of(run)])
    assert account.awaits_phase(run, "stopped", "failed", "lost")["phase"] == "stopped"
    account.leaves_nothing()
