"""`gangline profile` from a desk by real ssh: the traces of two hosts come here, and the run goes on."""

import gzip
import json

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import JOB, NewUser, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_steps_of_a_run_on_two_hosts_are_recorded_from_a_desk(lab, tmp_path):
    made = lab(2, binds=lab_folders(), meshed=True, disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(make_model(tmp_path / "model"), job=JOB.replace("steps: 400", "steps: 100000"))
    user.describes("h0", "h1")
    run = user.types("train", "job.yaml", "--detach").stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 3, "it trains")

    said = json.loads(user.types("profile", run, "--steps", "2", "--out", "t.json.gz", "--json").stdout)
    assert [(each["rank"], each["host"]) for each in said["ranks"]] == [(0, "h0"), (1, "h1")]
    assert 0 < said["clock_error_s"] < 0.05
    assert all(each["compute_s"] > 0 and each["exposed_s"] > 0 for each in said["ranks"])
    packed = user.desk.run(["/usr/bin/python3", "-c", "print(open('t.json.gz', 'rb').read().hex())"]).stdout
    events = json.loads(gzip.decompress(bytes.fromhex(packed)))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 on h0", "rank 1 on h1"}

    step = user.row(run)["step"]
    user.awaits(run, lambda row: row["step"] > step, "it goes on")
    user.types("stop", run)
