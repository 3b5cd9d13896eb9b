"""A lost host comes back: it gets ready beside the run, and the others go on until it is."""

import json

import pytest

from tests.lab.gang import assert_nothing_left
from tests.lab.hosts import lab_folders
from tests.lab.user import JOB, NewUser, make_model, processes_of_runs

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]
LONG = JOB.replace("every_steps: 50", "every_steps: 10").replace("steps: 400", "steps: 100000")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def without_h2(lab, model):
    """A run that goes on without its third host, which has lost its power and its cable; user, lab, run."""
    made = lab(3, binds=lab_folders(), disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(model, job=f"{LONG}failures: {{wait: 3s}}\n")
    user.describes(*(host.name for host in made.hosts))
    run = user.types("train", "job.yaml", "--detach").stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 15, "it trains")
    lost = made.hosts[2]
    lost.faults.unplug()
    lost.run(["kill", "-9", *(line.split()[0] for line in processes_of_runs(lost))], as_root=True)
    user.awaits(run, lambda row: row["attempt"] == 2 and (row["step"] or 0) > 20, "it goes on with two")
    return user, made, run


def told(user, run):
    lines = user.desk.read(f".local/state/gangline/runs/{run}/events.jsonl").decode().splitlines()
    return [each for each in map(json.loads, lines) if each.get("source") == "supervisor"]


def test_the_others_train_while_a_host_that_is_back_gets_ready_and_then_it_joins(without_h2):
    user, made, run = without_h2
    made.hosts[2].faults.heal()
    user.awaits(run, lambda row: row["attempt"] == 3, "the next attempt begins")
    row = user.awaits(run, lambda row: row["phase"] == "running" and (row["step"] or 0) > 0, "it trains with three")
    step = row["step"]
    user.awaits(run, lambda row: row["step"] > step, "it goes on")
    events = {each["event"]: each for each in told(user, run)}
    assert events["preparing"]["host"] == "h2"
    assert events["leaving"]["what"] == "h2 answers again and joins"
    metrics = made.hosts[0].read(f"gangline/runs/{run}/metrics.jsonl").decode().splitlines()
    steps = [each for each in map(json.loads, metrics) if each["kind"] == "step"]
    meanwhile = [each for each in steps if events["preparing"]["time"] < each["time"] < events["leaving"]["time"]]
    assert len(meanwhile) > 3
    assert {each["attempt"] for each in meanwhile} == {2}
    first = next(each for each in steps if each["attempt"] == 3)
    last = [each for each in steps if each["attempt"] == 2][-1]
    assert first["step"] == last["step"] + 1
    agent = json.loads(made.hosts[2].read(f"gangline/runs/{run}/attempts/3/h2/agent.json"))
    assert agent["tag"].endswith("/attempts/2/h2")  # the processes that waited
    user.types("stop", run)
    assert_nothing_left(made, folder=f"{made.hosts[0].home}/gangline")


def test_a_run_that_is_stopped_while_a_host_gets_ready_leaves_nothing_there(without_h2):
    user, made, run = without_h2
    made.hosts[2].faults.heal()
    user.awaits(run, lambda _: any(each["event"] == "preparing" for each in told(user, run)), "it gets ready")
    user.types("stop", run)
    assert user.row(run)["phase"] == "stopped"
    assert_nothing_left(made, folder=f"{made.hosts[0].home}/gangline")
