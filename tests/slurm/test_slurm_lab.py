"""The Slurm cluster of the lab is one: nodes, jobs, arrays, limits, GPUs as devices, and what is left."""

import time

import pytest


def output(lab, job):
    return lab.login.read(f"slurm-{job}.out").decode()


def test_every_node_is_idle_and_has_its_gpus(cluster):
    assert cluster.node_states() == ["n0 idle", "n1 idle", "n2 idle"]
    said = cluster.login.check(["sinfo", "--Node", "--noheader", "--partition=main", "--format", "%n %G"])
    assert said.split("\n")[:3] == ["n0 gpu:fake:2", "n1 gpu:fake:1", "n2 (null)"]
    assert cluster.left() == []


def test_a_job_runs_on_all_nodes_and_writes_to_the_shared_folder(cluster):
    job = cluster.submit("srun hostname", "--nodes=3")
    assert cluster.wait_state(job, "COMPLETED", "FAILED") == "COMPLETED"
    assert sorted(output(cluster, job).split()) == ["n0", "n1", "n2"]


def test_steps_get_the_gpus_that_they_ask_for(cluster):
    job = cluster.submit("srun sh -c 'echo $CUDA_VISIBLE_DEVICES'", "--nodes=1", "--gres=gpu:2")
    cluster.wait_state(job, "COMPLETED")
    assert output(cluster, job) == "0,1\n"


def test_scancel_ends_a_job_and_its_step_on_all_nodes(cluster):
    job = cluster.submit("srun sleep 600", "--nodes=3")
    cluster.wait_state(job, "RUNNING")
    deadline = time.monotonic() + 20
    while not (
        cluster.steps() == [f"{job}.0"]
        and all("/usr/bin/sleep 600" in cluster.pids(n, job).values() for n in cluster.names)
    ):
        assert time.monotonic() < deadline, (cluster.steps(), [cluster.pids(name, job) for name in cluster.names])
        time.sleep(0.1)
    cluster.login.check(["scancel", job])
    assert cluster.wait_state(job, "CANCELLED") == "CANCELLED"
    assert cluster.left() == []


def test_an_array_runs_so_many_tasks_at_once(cluster):
    task = "until [ -e go ]; do sleep 0.2; done; echo $SLURM_ARRAY_TASK_ID"
    cluster.submit(task, "--array=0-7%2", "--output=array-%a.out")
    deadline = time.monotonic() + 60
    while sum(each.state == "RUNNING" for each in cluster.jobs()) < 2:
        assert time.monotonic() < deadline, cluster.jobs()
        time.sleep(0.2)
    time.sleep(1)
    assert sum(each.state == "RUNNING" for each in cluster.jobs()) == 2
    cluster.login.write("go", "")
    cluster.wait_idle()
    deadline = time.monotonic() + 30
    while cluster.jobs():
        assert time.monotonic() < deadline, cluster.jobs()
        time.sleep(0.2)
    assert [cluster.login.read(f"array-{number}.out") for number in range(8)] == [b"%d\n" % n for n in range(8)]


def test_a_requeued_job_starts_again_soon(cluster):
    job = cluster.submit('[ "$SLURM_RESTART_COUNT" = 1 ] && exit; sleep 600', "--requeue")
    cluster.wait_state(job, "RUNNING")
    cluster.login.check(["scontrol", "requeue", job])
    assert cluster.wait_state(job, "COMPLETED", "FAILED", timeout_s=40) == "COMPLETED"


def test_a_lost_node_is_down_and_comes_back(slurm):
    lab = slurm(2)
    lab.power_off("n1")
    deadline = time.monotonic() + 60
    while "n1 down*" not in lab.node_states():
        assert time.monotonic() < deadline, lab.node_states()
        time.sleep(0.5)
    lab.power_on("n1")
    lab.wait_idle()
    assert lab.login.check(["srun", "--nodelist=n1", "hostname"]) == "n1\n"


def test_slurmctld_can_be_killed_and_comes_back_with_its_jobs(slurm):
    lab = slurm(1)
    job = lab.submit("sleep 600")
    lab.wait_state(job, "RUNNING")
    lab.kill_controller()
    assert "Unable to contact slurm controller" in lab.login.run(["squeue"]).stderr
    lab.start_controller()
    assert lab.wait_state(job, "RUNNING") == "RUNNING"


@pytest.mark.parametrize(("how", "words"), [("missing", "No such file"), ("fails", "Socket timed out")])
def test_a_command_of_slurm_can_be_broken(cluster, how, words):
    with cluster.broken("squeue", how):
        done = cluster.login.run(["squeue"])
        assert done.returncode
        assert words in done.stderr
    assert cluster.jobs() == []


def test_accounting_knows_accounts_and_the_ends_of_jobs(slurm):
    lab = slurm(1, accounting=True)
    assert "physics" in lab.login.check(
        ["sacctmgr", "--noheader", "--parsable2", "list", "associations", "format=account"]
    )
    job = lab.submit("exit 3", "--account=physics")
    lab.wait_state(job, "FAILED")
    deadline = time.monotonic() + 20
    while (said := lab.login.check(["sacct", "-nPX", "-j", job, "-o", "State,ExitCode"])) != "FAILED|3:0\n":
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    refused = lab.login.run(["sbatch", "--account=chemistry", "--wrap", "true"])
    assert "Invalid account or account/partition combination specified" in refused.stderr
