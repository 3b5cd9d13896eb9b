"""`gangline profile` over two real hosts, reached by ssh: their traces come here, on one time axis."""

import gzip
import json

import pytest

from tests.lab.user import NewUser, make_model

pytestmark = pytest.mark.timeout(420)


def test_steps_of_two_hosts_lie_on_one_axis(lab, tmp_path):
    made = lab(2, disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(make_model(tmp_path))
    user.describes(*(host.name for host in made.hosts))
    run = user.types("train", "job.yaml", "--detach").stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 2, "it trains")
    said = json.loads(user.types("profile", run, "--steps", "2", "--out", "t.json.gz", "--json").stdout)
    assert [each["host"] for each in said["ranks"]] == ["h0", "h1"]
    assert 0 < said["clock_error_s"] < 0.1
    events = json.loads(gzip.decompress(made.user.read("t.json.gz")))["traceEvents"]
    spans = [event for event in events if event["name"] == "gangline: steps" and event["ph"] == "X"]
    assert sorted(event["pid"] for event in spans) == [0, 1]
    # both of them begin after the same exchange, by one clock
    begins, longest = [event["ts"] for event in spans], max(event["dur"] for event in spans)
    assert max(begins) - min(begins) < longest
    exchanged = {event["pid"] for event in events if str(event["name"]).startswith("gloo:")}
    assert exchanged == {0, 1}
    row = user.row(run)
    user.awaits(run, lambda now: now["step"] > row["step"], "the run goes on")
    user.types("stop", run)
