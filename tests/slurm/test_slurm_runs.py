"""Runs of gangline on a real Slurm cluster, from the login host: submitted, followed, ended in every way, resumed."""

import time

import pytest

from tests.lab.user import JOB, make_model
from tests.slurm.cluster import SlurmLab
from tests.slurm.user import Account

pytestmark = pytest.mark.timeout(600)
ENDLESS = JOB.replace("steps: 400", "steps: 100000").replace("every_steps: 50", "every_steps: 20")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_cluster():
    with SlurmLab(3, ttl_s=1800, settings={"KillWait": 15}) as lab:
        yield lab


# --- before it begins


@pytest.mark.parametrize(
    ("keys", "words", "advice"),
    [
        pytest.param({"partition": "gpu"}, "invalid partition specified: gpu", "sinfo -s", id="partition"),
        pytest.param(
            {"gpus_per_node": 4, "gpus_by": "gres"}, "Requested node configuration is not available", "sinfo", id="gres"
        ),
    ],
)
def test_what_does_not_exist_is_told_in_slurms_words_and_ours_and_leaves_no_run(account, keys, words, advice):
    account.desk.write("project/loop.py", "")
    account.describes(**keys)
    done = account.types("run", "--detach", "--dir", "project", "--", "loop.py", code=None)
    assert done.returncode != 0
    assert words in done.stderr
    assert advice in done.stderr
    assert account.desk.run(["ls", ".gangline/runs"]).stdout == ""


def test_a_run_that_can_never_start_says_why(account):
    run = account.runs(nodes=9)
    assert account.awaits(run, lambda row: row["waits"], "a reason")["waits"] == "PartitionConfig"
    account.types("stop", run)


def test_a_run_that_waits_says_why_and_is_cancelled_by_stop(account):
    blocker = account.lab.submit("sleep 600", "--nodes=3", "--exclusive")
    account.lab.wait_state(blocker, "RUNNING")
    run = account.runs()
    assert account.row(run)["phase"] == "queued"
    assert "has not begun" in account.types("save", run, code=2).stderr
    assert "Resources" in account.types("ps").stdout
    job = account.job_of(run)
    account.types("stop", run)
    assert account.row(run)["phase"] == "stopped"
    assert account.lab.wait_state(job, "CANCELLED") == "CANCELLED"


def test_ps_and_stop_survive_a_slurm_that_does_not_answer(account):
    blocker = account.lab.submit("sleep 600", "--nodes=3", "--exclusive")
    account.lab.wait_state(blocker, "RUNNING")
    run = account.runs()
    with account.lab.broken("squeue", "fails"):
        assert account.row(run)["phase"] == "queued"
    with account.lab.broken("squeue", "missing"):
        assert account.row(run)["phase"] == "queued"
    account.types("stop", run)
    assert account.row(run)["phase"] == "stopped"


def test_ps_asks_slurm_once_for_all_runs(account):
    blocker = account.lab.submit("sleep 600", "--nodes=3", "--exclusive")
    account.lab.wait_state(blocker, "RUNNING")
    runs = [account.runs() for _ in range(2)]
    with account.lab.counted("squeue") as calls:
        assert [account.row(run)["phase"] for run in runs[:1]] == ["queued"]
        assert len(calls()) == 1, calls()
    for run in runs:
        account.types("stop", run)


# --- while it runs


def test_a_script_runs_to_its_end_on_two_nodes(account):
    run = account.runs(steps=20)
    row = account.awaits_phase(run, "finished", "failed")
    assert row["phase"] == "finished", account.log_of(run)
    found = account.desk.check(["sh", "-c", f"grep -l 'step 19' work/*/runs/{run}/attempts/1/rank-*.log"])
    assert found.split() == [f"work/n{rank}/runs/{run}/attempts/1/rank-{rank}.log" for rank in range(2)]
    account.leaves_nothing()
    assert account.types("logs", run).stdout.count("step 19") == 2


def test_scancel_ends_a_run_and_nothing_is_left(account):
    run = account.runs()
    account.awaits_output(run, "step 3")
    account.lab.login.check(["scancel", account.job_of(run)])
    row = account.awaits_phase(run, "stopped", "failed", "lost")
    assert row["phase"] == "stopped", account.log_of(run)
    account.leaves_nothing()


def test_a_run_that_trains_saves_on_request_and_is_stopped_with_a_checkpoint_and_leaves_nothing(account, model):
    run = account.trains(model, job=ENDLESS)
    account.awaits_step(run, 1)
    name, *words, step = account.types("save", run).stdout.split()
    assert (name, words) == (run, ["saved", "step"])
    folders = account.desk.check(["sh", "-c", f"ls -d work/*/runs/{run}/checkpoints/step-{int(step):08d}/COMMITTED"])
    assert len(folders.split()) == 2
    account.awaits_step(run, int(step) + 1)
    account.types("stop", run)
    row = account.row(run)
    assert row["phase"] == "stopped"
    account.leaves_nothing()


def test_at_the_time_limit_a_run_saves_is_requeued_and_goes_on_by_itself(account, model):
    run = account.trains(model, job=ENDLESS, time="00:02:00", save_before=50)
    account.awaits_step(run, 5)
    row = account.awaits(run, lambda row: row["attempt"] == 2, "the second attempt", patience_s=180)
    assert row["error"] is None
    account.awaits_step(run, row["step"] or 1)
    assert account.lab.shown(account.job_of(run))["Restarts"] == "1", account.log_of(run)
    account.types("stop", run)
    account.leaves_nothing()


# --- what takes long: make slurm ALL=1


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_nodes(account, model):
    run = account.trains(model, job=ENDLESS)
    before = account.awaits_step(run, 25)["step"]
    account.types("stop", run)
    account.describes(nodes=3)
    account.types("resume", run, "--cluster", "cluster.yaml", "--detach")
    account.awaits(run, lambda row: row["phase"] == "running" and (row["step"] or 0) > before, "more steps")
    assert account.row(run)["attempt"] == 2
    assert account.lab.shown(account.job_of(run))["NumNodes"] == "3"
    account.types("stop", run)
    account.leaves_nothing()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_meets_its_time_limit_twice_goes_on_both_times(account, model):
    run = account.trains(model, job=ENDLESS, time="00:03:00", save_before=60)
    for attempt in (2, 3):
        row = account.awaits(run, lambda row, n=attempt: row["attempt"] >= n, f"attempt {attempt}", patience_s=300)
        assert row["error"] is None
    account.awaits_step(run, 1)
    assert int(account.lab.shown(account.job_of(run))["Restarts"]) >= 2, account.log_of(run)
    account.types("stop", run)
    account.leaves_nothing()


@pytest.mark.slow
def test_what_has_ended_can_be_used_while_its_job_leaves_slurm(slurm, model):
    account = Account(slurm(2, settings={"Epilog": "/home/ada/epilog"}))
    account.desk.write("epilog", "#!/bin/sh\nuntil [ -e /home/ada/left ]; do sleep 0.2; done\n", 0o755)
    run = account.trains(model, job=JOB.replace("steps: 400", "steps: 20"))
    account.awaits_phase(run, "finished", "failed")
    account.lab.wait_state(account.job_of(run), "COMPLETING")
    assert "step 20" in account.types("export", run, "--to", "tuned").stderr
    account.types("chat", run, "--prompt", "fox", "--max-tokens", "4")
    assert account.lab.shown(account.job_of(run))["JobState"] == "COMPLETING"
    account.desk.write("left", "")


@pytest.mark.slow
def test_a_run_that_gives_way_to_a_higher_partition_goes_on_after_it(account, model):
    run = account.trains(model, job=ENDLESS, nodes=3, partition="main")
    account.awaits_step(run, 25)
    urgent = account.lab.submit("sleep 5", "--nodes=3", "--exclusive", "--partition=urgent")
    account.lab.wait_state(urgent, "COMPLETED", timeout_s=90)
    row = account.awaits(run, lambda row: row["attempt"] == 2 and row["step"], "steps of the second attempt")
    assert row["error"] is None
    assert account.lab.shown(account.job_of(run))["Restarts"] == "1"
    account.types("stop", run)
    account.leaves_nothing()


@pytest.mark.slow
def test_a_run_survives_a_slurmctld_that_is_killed_and_comes_back(account):
    run = account.runs()
    account.awaits_output(run, "step 3")
    account.lab.kill_controller()
    assert account.row(run)["phase"] == "running"
    account.lab.start_controller()
    account.types("stop", run)  # at once: for some seconds Slurm still starts no step
    assert account.row(run)["phase"] == "stopped"
    account.leaves_nothing()


@pytest.mark.slow
def test_a_run_goes_on_after_one_of_its_nodes_loses_power(slurm, model):
    account = Account(slurm(3))
    run = account.trains(model, job=ENDLESS)
    account.awaits_step(run, 25)
    account.lab.power_off("n1")
    account.awaits(
        run, lambda row: row["phase"] == "running" and row["attempt"] >= 2 and row["step"], "more steps", patience_s=240
    )
    account.types("stop", run)
    account.leaves_nothing()


@pytest.mark.slow
def test_a_run_goes_on_after_its_first_node_loses_power(slurm, model):
    account = Account(slurm(2))
    run = account.trains(model, job=ENDLESS, nodes=1)
    before = account.awaits_step(run, 45)["step"]
    (first,) = [job.nodes for job in account.lab.jobs() if job.id == account.job_of(run)]
    account.lab.power_off(first)
    row = account.awaits(
        run, lambda row: row["attempt"] == 2 and (row["step"] or 0) > before, "more steps", patience_s=240
    )
    assert row["error"] is None
    assert account.lab.shown(account.job_of(run))["Restarts"] == "1", account.log_of(run)
    account.types("stop", run)
    account.leaves_nothing()


@pytest.mark.slow
def test_attach_follows_a_run_through_the_queue_to_its_end(account):
    holder = account.lab.submit("sleep 300", "--nodes=3", "--exclusive")
    run = account.runs(steps=20)
    account.awaits(run, lambda row: row["waits"] in {"Resources", "Priority"}, "a reason of Slurm")
    account.lab.login.check(["sh", "-c", f"(sleep 6; scancel {holder}) >/dev/null 2>&1 &"])
    said = account.types("attach", run).stderr
    assert f"job {account.job_of(run)} waits: " in said
    assert "finished" in said
    account.leaves_nothing()


@pytest.mark.slow
def test_inside_an_allocation_its_nodes_are_the_hosts_and_the_run_ends_with_it(account, model):
    account.brings(model, job=ENDLESS)
    account.desk.write("project/loop.py", "print('hello')")
    story = """
gangline run --dir project -- loop.py > first.txt 2>&1 || exit 3
gangline train job.yaml --detach > second.txt
"""
    account.desk.check(["salloc", "--nodes=2", "sh", "-c", story], timeout_s=200)
    run = account.desk.read("second.txt").decode().strip()
    assert account.awaits_phase(run, "stopped", "lost", "failed")["phase"] == "stopped"
    assert account.newest() == run
    account.leaves_nothing()


@pytest.mark.slow
def test_a_token_reaches_the_ranks_and_stays_on_no_disk(account):
    account.desk.write("project/said.py", "import os; print('ends in', os.environ['HF_TOKEN'][-4:])")
    account.describes()
    account.desk.check(
        ["env", "HF_TOKEN=hf_canary_1234", "gangline", "run", "--dir", "project", "--", "said.py"], timeout_s=150
    )
    assert account.types("logs", account.newest()).stdout.count("ends in 1234") == 2
    for host in (account.lab.login, account.lab.ctl, *account.lab.nodes):
        assert host.run(["grep", "-rls", "hf_canary", "/home/ada", "/var/spool", "/var/log", "/tmp"]).stdout == ""
    account.leaves_nothing()


@pytest.mark.slow
def test_a_run_whose_supervisor_is_killed_gets_another_one_and_goes_on(account):
    run = account.runs()
    account.awaits_output(run, "step 3")
    assert any(node.run(["pkill", "-9", "-f", "gangline[.]supervise "]).returncode == 0 for node in account.lab.nodes)
    account.awaits_output(run, "step 200")
    assert account.row(run)["phase"] == "running", account.log_of(run)
    account.types("stop", run)
    assert account.row(run)["phase"] == "stopped"
    account.leaves_nothing()


@pytest.mark.slow
def test_a_suspended_run_says_so_at_once_and_goes_on_in_the_same_attempt(account, model):
    run = account.trains(model, job=ENDLESS)
    account.awaits_step(run, 25)
    job, begun = account.job_of(run), time.monotonic()
    account.lab.ctl.check(["scontrol", "suspend", job])
    try:
        row = account.row(run)
        assert (row["phase"], row["suspended"]) == ("running", job)
        assert row["step"] >= 25
        assert f"suspended (Slurm's job {job})" in account.types("ps").stdout
        assert f"scontrol resume {job}" in account.types("explain", run).stdout
        assert f"scancel {job}" in account.types("stop", run, code=4).stderr
        assert time.monotonic() - begun < 45  # a step would wait for a minute, each time
    finally:
        account.lab.ctl.check(["scontrol", "resume", job])
    account.awaits(run, lambda now: (now["step"] or 0) > row["step"] + 20, "it goes on")
    assert account.row(run)["attempt"] == 1
    account.types("stop", run)
    account.leaves_nothing()
