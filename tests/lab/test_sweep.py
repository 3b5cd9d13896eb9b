"""A sweep on three real hosts, one of which loses its power: every point is tried to its end."""

import json
import time

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import TEXT, NewUser, make_model, processes_of_runs

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

JOB = """
model: ./model
method: {kind: lora, rank: 4}
data: {train: ./rows.jsonl, eval: 0.1, sequence_length: 64}
batch: 8
micro_batch: 2
steps: 60
checkpoint: {every_steps: 20}
"""
RATES = "1e-4,3e-4,1e-3,3e-3,5e-3"
PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_every_point_is_tried_though_a_host_loses_its_power(lab, model):
    made = lab(3, binds=lab_folders(), meshed=True, disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(model, job=JOB)
    rows = [json.dumps({"text": text}) for text in TEXT.split("\n\n")[:500]]
    user.desk.write("rows.jsonl", "\n".join(rows))
    user.describes(*(host.name for host in made.hosts))

    sweep = user.types("sweep", "job.yaml", f"optimizer.learning_rate={RATES}", "--detach").stdout.strip()
    found = awaits(user, sweep, lambda now: sum(trial["step"] > 2 for trial in now["trials"]) == 3, "three train")
    assert {trial["hosts"][0] for trial in found["trials"] if trial["hosts"]} == {"h0", "h1", "h2"}
    run = next(trial["run"] for trial in found["trials"] if trial["hosts"] == ["h0"])
    records = json.loads(user.desk.read(f".local/state/gangline/runs/{run}/supervision.json"))
    assert records["host"] == "h0"  # a trial needs the user's computer only for its start

    made.hosts[2].power_off()
    found = awaits(user, sweep, lambda now: now["phase"] == "finished", "all have ended")
    assert [trial["phase"] for trial in found["trials"]] == ["finished"] * 5
    assert {trial["hosts"][0] for trial in found["trials"] if len(trial["places"]) > 1} <= {"h0", "h1"}
    assert all(trial["losses"]["60"] is not None for trial in found["trials"])
    assert [line for host in (*made.hosts[:2], made.user) for line in processes_of_runs(host)] == []


def awaits(user, sweep, condition, what):
    """Look at the sweep until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition(now := json.loads(user.types("sweep", "show", sweep, "--json").stdout)):
        assert time.monotonic() < deadline, f"without an answer: {what}\n{now}\n{log(user, sweep)}"
        time.sleep(2.0)
    return now


def log(user, sweep):
    """The last lines that the supervisor wrote."""
    return user.desk.read(f".local/state/gangline/sweeps/{sweep}/supervisor.log").decode()[-4000:]
