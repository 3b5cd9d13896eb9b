"""What a host agent says of the ranks' silence is taken over; what cannot be true makes its host one that is not
understood."""

import json
from dataclasses import replace
from pathlib import PurePath

import pytest

from gangline.launch.backend import HostRequest, LaunchRequest, RankSilence
from gangline.launch.poll import HostPoller
from tests.fakes.transport import FakeTransport

PART = HostRequest(host="pc1", folder="/srv/pc1", rank_files="/srv", argv=(), env={}, ranks=(2, 3), program="command")
STAT = " ".join(["4711", "(a)", "S", *["0"] * 18, "99", "0"]).encode()
ROW = {"silent_s": 7, "age_s": 90, "printed": True, "line": "step 1"}


def look(text):
    host = FakeTransport("pc1")
    host.write(PurePath("/srv/pc1/status.json"), text.encode())
    host.write(PurePath("/proc/4711/stat"), STAT)
    (status,) = HostPoller().at(LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=(PART,)), {"pc1": host})
    return status


def said(silence):
    return json.dumps({"pid": 4711, "start_ticks": 99, "beat": 7, "silence": silence})


def test_how_long_ranks_were_silent_is_taken_over():
    status = look(said({"2": ROW, "3": {**ROW, "printed": False, "line": ""}}))
    assert status.phase == "running"
    first = RankSilence(rank=2, silent_s=7, age_s=90, has_printed=True, line="step 1")
    assert status.silence == (first, replace(first, rank=3, has_printed=False, line=""))


def test_a_host_agent_that_says_nothing_of_it_says_nothing():
    assert look(json.dumps({"pid": 4711, "start_ticks": 99})).silence == ()


def test_a_line_is_one_line_and_not_long():
    lines = [look(said({"2": {**ROW, "line": text}})).silence[0].line for text in ("x" * 10**6, "a\nerror: b", 7)]
    assert lines == ["x" * 200, "a error: b", "7"]


@pytest.mark.parametrize(
    "silence",
    [
        [],
        "2",
        7,
        None,
        {"2": []},
        {"2": None},
        {"2": {}},
        {"two": ROW},
        {"9" * 5000: ROW},
        {"0": ROW},
        {"-2": ROW},
        {"2": {**ROW, "silent_s": "soon"}},
        {"2": {**ROW, "silent_s": None}},
        {"2": {**ROW, "silent_s": float("nan")}},
        {"2": {**ROW, "silent_s": float("-inf")}},
        {"2": {**ROW, "silent_s": -1}},
        {"2": {**ROW, "silent_s": 91}},
        {"2": {**ROW, "silent_s": 10**400, "age_s": 10**400}},
        {"2": {**ROW, "age_s": True}},
        {"2": {**ROW, "age_s": 10**10}},
    ],
    ids=lambda silence: str(silence)[:40],
)
def test_a_host_that_says_what_cannot_be_is_not_understood(silence):
    status = look(said(silence))
    assert status.phase == "unreachable"
    assert status.why.startswith("what it says cannot be understood")
