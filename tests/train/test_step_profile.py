"""`gangline profile` on a run of real ranks: one time axis, where the time went, and a run that goes on."""

import gzip
import json
import struct
import time

import pytest

from gangline.runs.layout import PHASES
from tests.train.story import copy_world, make_user, write_cluster, write_job

pytestmark = pytest.mark.timeout(600)
PHASE = struct.Struct("<qqqd")


@pytest.fixture
def user(world, quick_python, tmp_path):
    user = make_user(tmp_path / "user", python=quick_python)
    copy_world(world, user)
    write_cluster(user, "two", pc1={"share": 1}, pc2={"share": 1, "env": {"GANGLINE_SIMULATED_SLOWDOWN": 3}})
    yield user
    user.end_runs()


def phases_of_profile(user, run):
    """The phases of rank 0 while many steps are recorded and written."""
    file = user.at_host("pc1", run) / "attempts" / "1" / "rank-0.phase"
    profiling, found = user.start("gangline", "profile", run, "--steps", "20", "--out", "u.json.gz"), set()
    while profiling.poll() is None:
        found.add(PHASES[PHASE.unpack(file.read_bytes())[1]])
        time.sleep(0.002)
    said, error = profiling.communicate()
    assert profiling.returncode == 0, said + error
    return found


def test_steps_of_a_run_are_recorded_on_all_ranks_and_the_run_goes_on(user):
    write_job(user, steps=100000, checkpoint={"every_steps": 100000})
    run = user.gangline("train", "job.yaml", "--cluster", "two.yaml", "--detach").out.strip()
    user.wait_for_step(run, 5)
    for number in (1, 2):  # an order is obeyed once, and there may be another one
        said = json.loads(user.gangline("profile", run, "--steps", "2", "--out", "t.json.gz", "--json").out)
        assert [each["rank"] for each in said["ranks"]] == [0, 1], number
        assert said["first_step"] > 5
    assert 0 < said["clock_error_s"] < 0.05
    for each in said["ranks"]:
        parts = each["compute_s"] + each["exposed_s"] + each["data_s"] + each["idle_s"]
        assert parts == pytest.approx(each["window_s"], rel=0.02)
        assert each["compute_s"] > 0
        assert each["data_s"] > 0
        assert each["kernels"]
    fast, slow = said["ranks"]
    assert fast["exposed_s"] > slow["exposed_s"], "the fast rank waits for the slow one in the exchange"

    events = json.loads(gzip.decompress((user.folder / "t.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 on pc1", "rank 1 on pc2"}
    spans = {event["pid"]: event for event in events if event["name"] == "gangline: steps" and event["ph"] == "X"}
    assert set(spans) == {0, 1}
    # both end with the exchange of the last step: on one axis nearly at the same time
    ends = [event["ts"] + event["dur"] for event in spans.values()]
    assert abs(ends[0] - ends[1]) < 0.2 * spans[0]["dur"]

    step = user.metrics("pc1", run)[-1]["step"]
    user.wait_for_step(run, step + 2)
    shown = user.gangline("profile", run).out
    assert "steps took" in shown
    assert "https://ui.perfetto.dev" in shown
    assert list(user.folder.glob(f"{run}-step-*.trace.json.gz"))
    assert "save" in phases_of_profile(user, run), "a trace may take longer than a step may"
    refused = user.gangline("profile", run, "--out", ".", code=2)
    assert ". is a folder" in refused.err
    assert "--out trace.json.gz" in refused.err
    user.gangline("stop", run)
    refused = user.gangline("profile", run, code=2)
    assert f"{run} does not train now" in refused.err
