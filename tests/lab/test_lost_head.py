"""The head of a run is off for good: one command goes on without it, and nothing runs twice."""

import json
import re
import time

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import JOB, PATIENCE_S, NewUser, make_model, processes_of_runs

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trained(lab, model, request):
    """A run on three hosts, supervised by the first of them, with a step that every host has; user, lab, run."""
    made = lab(3, binds=lab_folders(), meshed=True, disk="8g", shm="2g")
    user = NewUser(made.user)
    steps = getattr(request, "param", 400)
    job = JOB.replace("every_steps: 50", "every_steps: 10").replace("steps: 400", f"steps: {steps}")
    user.brings(model, job=job)
    user.describes(*(host.name for host in made.hosts))
    run = user.types("train", "job.yaml", "--detach").stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 25, "it trains")
    return user, made, run


def test_one_command_goes_on_without_the_head(trained):
    user, made, run = trained
    head, *others = made.hosts
    head.power_off()

    row = user.row(run)
    assert row["silent"]
    assert row["step"] > 25  # the last that was heard
    assert row["heard"]
    told = json.loads(user.types("explain", run, "--json").stdout)
    assert told["go_on"]["why"].endswith(f"if h0 is off: gangline resume {run} --without h0")
    for words in (("stop", run), ("resume", run, "--detach")):
        refused = user.types(*words, code=4)
        assert f"gangline resume {run} --without h0" in refused.stderr

    resumed = user.types("resume", run, "--without", "h0", "--detach")
    step = int(re.search(r"from step (\d+)", resumed.stderr)[1])
    assert step >= 20
    row = user.awaits(run, lambda now: (now["step"] or 0) > step, "it goes on with two hosts")
    assert (row["phase"], row["attempt"], row["silent"]) == ("running", 2, None)
    told = json.loads(user.types("explain", run, "--json").stdout)
    assert told["attempts"][0]["cause"]["what"] == "h0 was off, and the run was continued without it"

    user.types("stop", run)
    assert [line for host in others for line in processes_of_runs(host)] == []


@pytest.mark.timeout(900)
def test_another_computer_takes_the_run_in_and_goes_on_with_it(trained):
    """With the cluster file and its keys, and neither the job nor the model nor the data."""
    user, made, run = trained
    user.desk.run(["mkdir", "-p", "elsewhere"])
    user.desk.write("elsewhere/cluster.yaml", user.desk.read("cluster.yaml"))

    def types(*words, code=0):
        typed = " ".join(words)
        line = f"cd elsewhere && GANGLINE_HOME=$HOME/second gangline {typed}"
        done = user.desk.run(["sh", "-c", line], timeout_s=200)
        assert done.returncode == code, f"{typed}\n{done.stdout}\n{done.stderr}"
        return done

    (row,) = json.loads(types("ps", "--cluster", "cluster.yaml", "--json").stdout)["runs"]
    assert (row["id"], row["phase"], row["silent"]) == (run, "running", None)
    assert row["step"] > 25
    assert "step" in types("logs", run).stdout
    types("stop", run)
    stopped = user.row(run)
    assert stopped["phase"] == "stopped"
    exported = types("export", run, "--to", "tuned")
    assert str(stopped["step"]) in exported.stdout + exported.stderr

    types("resume", run, "--detach")
    taken = user.types("ps", "--cluster", "cluster.yaml")
    assert f"{run}: resumed by another computer, found on h0" in taken.stderr
    user.awaits(run, lambda now: now["phase"] == "running" and now["step"] > stopped["step"], "it goes on")
    head, *others = made.hosts
    head.power_off()
    refused = types("stop", run, code=4)
    assert f"gangline resume {run} --without h0" in refused.stderr
    without_data = types("resume", run, "--without", "h0", "--detach", code=2)  # it was on h0, and is not here
    assert "expected a file on the head of the cluster; there is none" in without_data.stderr
    user.types("resume", run, "--without", "h0", "--detach")
    user.awaits(run, lambda now: now["phase"] == "running" and now["attempt"] == 3, "the first computer has it")
    user.types("stop", run)
    assert [line for host in others for line in processes_of_runs(host)] == []


def test_a_head_that_others_reach_is_not_taken_for_off(trained):
    """This computer alone does not reach it: the run goes on there, and nothing of it is ended."""
    user, made, run = trained
    head = made.hosts[0]
    head.faults.cut(made.user.address)
    refused = user.types("resume", run, "--without", "h0", "--detach", code=None)
    assert refused.returncode != 0
    assert f"{run} may still run on h0: it is on" in refused.stderr
    assert "h1 reaches it at" in refused.stderr
    head.faults.heal()
    before = user.row(run)["step"]
    user.awaits(run, lambda row: row["step"] > before, "it still trains on all three")
    assert user.row(run)["attempt"] == 1
    user.types("stop", run)
    assert [line for host in made.hosts for line in processes_of_runs(host)] == []


def test_a_host_that_is_off_beside_the_head_is_named(trained):
    user, made, run = trained
    head, other, last = made.hosts
    head.power_off()
    other.power_off()
    refused = user.types("resume", run, "--without", "h0", "--detach", code=4)
    assert f"gangline resume {run} --without h0 --without h1" in refused.stderr
    user.types("resume", run, "--without", "h0", "--without", "h1", "--detach")
    user.awaits(run, lambda now: now["phase"] == "running" and (now["step"] or 0) > 0, "one host goes on")
    user.types("stop", run)
    assert processes_of_runs(last) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("trained", [100_000], indirect=True)
def test_a_head_that_was_only_cut_off_gives_up_when_it_is_back(trained):
    """It had gone on alone: two versions of the run, until the others answer and their slots are in use."""
    user, made, run = trained
    head = made.hosts[0]
    head.faults.unplug()
    awaits(lambda: state_on(head, run)["attempt"] == 2, "the head goes on alone")
    user.types("resume", run, "--without", "h0", "--detach")
    before = user.awaits(run, lambda now: (now["step"] or 0) > 0, "the others go on")["step"]

    head.faults.heal()
    awaits(lambda: processes_of_runs(head) == [], "nothing is left on the old head")
    assert state_on(head, run)["phase"] == "failed"
    assert state_on(head, run)["error"]["fix"].startswith("another computer continued the run")
    row = user.awaits(run, lambda now: now["step"] > before + 10, "the others were not disturbed")
    assert (row["phase"], row["attempt"], row["silent"]) == ("running", 2, None)
    user.types("stop", run)
    assert [line for host in made.hosts for line in processes_of_runs(host)] == []


def state_on(host, run):
    return json.loads(host.read(f"gangline/runs/{run}/state.json"))


def awaits(done, what, *, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(1)
