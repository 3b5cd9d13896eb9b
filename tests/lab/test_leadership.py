"""The head of a run is lost, and another host goes on by itself; a head that comes back gives up or joins."""

import json
import os
import signal
import time

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.limits import processes_of
from tests.lab.referee import Records, ranks_left
from tests.lab.user import JOB, PATIENCE_S, NewUser, make_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trained(lab, model):
    """A run on three hosts, supervised by the first of them, with a step that every host has; user, lab, run."""
    made = lab(3, binds=lab_folders(), disk="8g", shm="2g")
    user = NewUser(made.user)
    job = JOB.replace("every_steps: 50", "every_steps: 10").replace("steps: 400", "steps: 100000")
    user.brings(model, job=job)
    user.describes(*(host.name for host in made.hosts), more="\ntakeover: votes\n")
    refused = user.types("train", "job.yaml", "--detach", code=None)
    assert refused.returncode != 0
    assert "the hosts cannot take over from each other, as `takeover: votes` asks" in refused.stderr
    user.types("prepare", "--between-hosts", "--yes")
    started = user.types("train", "job.yaml", "--detach")
    assert "if h0 is lost, h1 or h2 takes the run over" in started.stderr
    run = started.stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 25, "it trains", patience_s=2 * PATIENCE_S)
    return user, made, run


def test_the_others_go_on_without_the_head(trained):
    user, made, run = trained
    head, *others = made.hosts
    records = Records().take(made.hosts, run)
    head.power_off()
    row = user.awaits(run, lambda now: now["attempt"] == 2 and (now["step"] or 0) > 20, "they go on")
    assert (row["phase"], row["silent"]) == ("running", None)
    told = json.loads(user.types("explain", run, "--json").stdout)
    assert told["attempts"][0]["cause"]["what"] == "h0, which supervised the run, was not heard any more"
    assert records.take(others, run).judge() == []
    assert in_turn(records) == ["h0", "h1"]
    history = records.files["h1"]["metrics.jsonl"].splitlines()
    assert any('"step": 1,' in line for line in history)  # as h0 has written it
    assert len(history) == len(set(history))
    user.types("stop", run)
    assert ranks_left(others) == []


def test_a_head_that_was_cut_off_gives_up_and_joins_again(trained):
    user, made, run = trained
    head, *others = made.hosts
    head.faults.unplug()
    awaits(lambda: state_on(others[0], run).get("attempt") == 2, "the others go on")
    awaits(lambda: state_on(head, run)["phase"] == "restarting", "the head ends its ranks, and begins nothing")
    awaits(lambda: step_on(others[0], run) > 20, "they train")
    assert state_on(head, run)["attempt"] == 1

    head.faults.heal()
    awaits(lambda: state_on(head, run)["phase"] == "failed", "it hears that another one leads")
    assert state_on(head, run)["error"]["what"] == f"h1 leads {run} now"
    user.awaits(run, lambda now: now["attempt"] == 3 and (now["step"] or 0) > 30, "it joins as any host")
    records = Records().take(made.hosts, run)
    assert records.judge() == []
    assert in_turn(records) == ["h0", "h1"]
    user.types("stop", run)
    assert ranks_left(made.hosts) == []


def test_a_head_that_sleeps_for_a_moment_stays_and_one_that_sleeps_for_long_does_not(trained):
    user, made, run = trained
    head, *others = made.hosts
    freeze(head, signal.SIGSTOP)
    time.sleep(10)
    freeze(head, signal.SIGCONT)
    step = step_on(head, run)
    awaits(lambda: step_on(head, run) > step, "it goes on")
    assert Records().take(made.hosts, run).leaders == {1: {"h0"}}

    freeze(head, signal.SIGSTOP)
    awaits(lambda: state_on(others[0], run).get("attempt") == 2, "the others go on")
    freeze(head, signal.SIGCONT)
    awaits(lambda: state_on(head, run)["phase"] == "failed", "it hears that another one leads")
    user.awaits(run, lambda now: now["phase"] == "running" and (now["step"] or 0) > step, "it goes on")
    records = Records().take(made.hosts, run)
    assert records.judge() == []
    user.types("stop", run)
    assert ranks_left(made.hosts) == []


def test_one_of_two_hosts_goes_on_with_a_witness(lab, model):
    made = lab(3, binds=lab_folders(), disk="8g", shm="2g")
    head, other, nas = made.hosts
    user = NewUser(made.user)
    job = JOB.replace("every_steps: 50", "every_steps: 10").replace("steps: 400", "steps: 100000")
    user.brings(model, job=job)
    votes = f"\ntakeover: votes\nwitness: {{name: {nas.name}, address: {nas.address}}}\n"
    user.describes(*(host.name for host in (head, other)), more=votes)
    user.types("init", "--pin", "cluster.yaml", "--yes")
    refused = user.types("train", "job.yaml", "--detach", code=None)
    assert "lets no key of" in refused.stderr
    user.types("prepare", "--between-hosts", "--yes")
    started = user.types("train", "job.yaml", "--detach")
    assert "if h0 is lost, h1 takes the run over" in started.stderr
    assert "h2 as their witness" in started.stderr
    run = started.stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 25, "it trains", patience_s=2 * PATIENCE_S)
    head.faults.unplug()
    awaits(lambda: state_on(other, run).get("attempt") == 2, "the other one goes on")
    awaits(lambda: step_on(other, run) > 30, "it trains")
    head.faults.heal()
    awaits(lambda: state_on(head, run)["phase"] == "failed", "the head hears that another one leads")
    user.awaits(run, lambda now: now["attempt"] == 3 and (now["step"] or 0) > 40, "it joins as any host")
    records = Records().take([head, other], run)
    assert records.judge() == []
    assert in_turn(records) == ["h0", "h1"]
    other.power_off()
    awaits(lambda: state_on(head, run)["attempt"] == 4, "the head leads again")
    step = step_on(head, run)
    user.awaits(run, lambda now: now["phase"] == "running" and (now["step"] or 0) > step, "it goes on")
    user.types("stop", run)
    assert ranks_left([head]) == []


def in_turn(records):
    """Who has led, one after the other. A busy machine may lose the votes of a term, and then that has no leader."""
    assert all(len(names) == 1 for names in records.leaders.values())
    return [next(iter(names)) for _, names in sorted(records.leaders.items())]


def state_on(host, run):
    """What a host has in state.json; {}: nothing."""
    try:
        return json.loads(host.read(f"gangline/runs/{run}/state.json"))
    except FileNotFoundError:
        return {}


def step_on(host, run):
    """The last step that rank 0 has written there."""
    said = host.run(["tail", "-n", "1", f"gangline/runs/{run}/metrics.jsonl"]).stdout
    try:
        return json.loads(said).get("step", 0)
    except ValueError:
        return 0


def freeze(host, number):
    """Stop everything on a host, or let it go on."""
    for pid in processes_of(host.pid):
        os.kill(pid, number)


def awaits(done, what, *, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(1)
