"""One host that hangs keeps nobody waiting, and is told of as not answering."""

import json
import threading
import time
from dataclasses import replace
from pathlib import PurePath

import pytest

from gangline.errors import HostUnreachable
from gangline.launch.backend import HostRequest, Request
from gangline.launch.direct import DirectBackend
from gangline.launch.look import Looks, look
from gangline.remote.fake import FakeTransport, Scripted

PARTS = tuple(
    HostRequest(host=host, folder=f"/srv/{host}", rank_files="/srv", argv=(), env={}) for host in ("pc1", "pc2")
)
REQUEST = Request(run_id="calm-otter-7", attempt=1, hosts=PARTS)


class Slow(FakeTransport):
    """A host whose answers wait for the gate."""

    def __init__(self, host):
        super().__init__(host)
        self.gate = threading.Event()
        self.gate.set()

    def read(self, *words, **how):
        self.gate.wait(20)
        return super().read(*words, **how)


@pytest.fixture
def hosts():
    made = {part.host: Slow(part.host) for part in PARTS}
    yield made
    for host in made.values():
        host.gate.set()


def phases(looks, hosts):
    return [status.phase for status in looks.at(REQUEST, hosts)]


def test_a_host_that_hangs_is_unreachable_until_it_answers_and_the_others_are_not(hosts):
    looks = Looks(patience_s=0.2)
    assert phases(looks, hosts) == ["starting", "starting"]
    hosts["pc2"].gate.clear()
    assert phases(looks, hosts) == ["starting", "unreachable"]
    begun = time.monotonic()
    assert phases(looks, hosts) == ["starting", "unreachable"]
    assert time.monotonic() - begun < 0.15  # it is not waited for again
    status = looks.at(REQUEST, hosts)[1]
    assert status.why.startswith("no answer for")
    assert status.since is not None
    hosts["pc2"].gate.set()
    for _ in range(100):
        if phases(looks, hosts) == ["starting", "starting"]:
            break
        time.sleep(0.01)
    assert phases(looks, hosts) == ["starting", "starting"]


def test_since_when_it_is_silent_does_not_change_with_every_look(hosts):
    looks = Looks(patience_s=0.2)
    phases(looks, hosts)
    hosts["pc2"].reachable = False
    first = looks.at(REQUEST, hosts)[1]
    second = looks.at(REQUEST, hosts)[1]
    assert first.phase == second.phase == "unreachable"
    assert first.since == second.since
    assert first.why == "pc2 does not answer"


def test_one_look_by_itself_raises(hosts):
    hosts["pc1"].reachable = False
    with pytest.raises(HostUnreachable):
        look(PARTS[0], hosts["pc1"])


@pytest.mark.parametrize("text", [b"", b"{", b"\0" * 40])
def test_files_that_a_power_cut_has_damaged_are_not_there(hosts, text):
    for name in ("exit.json", "status.json", "guard.json"):
        hosts["pc1"].write(PurePath("/srv/pc1", name), text)
    assert look(PARTS[0], hosts["pc1"]).phase == "starting"


def test_what_the_guard_says_is_taken_over(hosts):
    start = {
        "launcher": True,
        "met": True,
        "ranks": {"10": {"torch": True, "met": True, "phase": "joining", "step": 0}, "9": {"torch": False, "met": False, "phase": None, "step": None}},
        "waits_for": ["10.77.0.10:51116"],
    }  # fmt: skip
    record = {"pid": 4711, "start_ticks": 99, "beat": 7, "epoch": 2, "failures": [], "start": start}
    hosts["pc1"].write(PurePath("/srv/pc1/status.json"), json.dumps(record).encode())
    words = ["4711", "(a (b) c)", "S", *["0"] * 18, "99", "0"]
    hosts["pc1"].write(PurePath("/proc/4711/stat"), " ".join(words).encode())
    status = look(PARTS[0], hosts["pc1"])
    assert (status.phase, status.beat, status.epoch) == ("running", 7, 2)
    assert [(sign.rank, sign.phase) for sign in status.signs.ranks] == [(9, None), (10, "joining")]
    assert status.signs.waits_for == ("10.77.0.10:51116",)


@pytest.mark.parametrize(
    "text", [b"[]", b"{}", b'"ended"', b'{"returncode": "soon"}', b'{"returncode": 0, "failures": 7}']
)
def test_a_host_whose_files_cannot_be_understood_is_unreachable_and_the_others_are_not(hosts, text):
    hosts["pc2"].write(PurePath("/srv/pc2/exit.json"), text)
    fine, lying = Looks().at(REQUEST, hosts)
    assert fine.phase == "starting"
    assert lying.phase == "unreachable"
    assert lying.why.startswith("what it says cannot be understood")


def test_failures_of_a_host_have_all_that_is_asked_for_later(hosts):
    failure = {"rank": 0, "pid": 1, "time": 2.0, "ordered": False, "error": {}, "exit": 1, "log": "l", "log_tail": []}
    record = {"returncode": 1, "error": None, "reason": "finished", "failures": [failure], "console_tail": []}
    hosts["pc1"].write(PurePath("/srv/pc1/exit.json"), json.dumps(record).encode())
    del failure["time"]
    hosts["pc2"].write(PurePath("/srv/pc2/exit.json"), json.dumps(record).encode())
    whole, lying = Looks().at(REQUEST, hosts)
    assert whole.failures[0]["error"] == {"what": "", "seen": "", "fix": ""}
    assert lying.phase == "unreachable"


def test_an_order_to_a_host_that_cannot_be_understood_has_not_been_heard(hosts):
    hosts["pc2"].write(PurePath("/srv/pc2/exit.json"), b"{}")
    assert DirectBackend().stop(REQUEST, hosts, now=True) == ["pc2"]


def test_the_port_is_looked_for_where_rank_0_was_and_nowhere_else():
    asked = {}

    def answer(host):
        def left(call):
            asked[host] = json.loads(call.stdin)["port"]
            return Scripted(stdout=json.dumps({"processes": [], "ports": [], "leases": [], "gpus": []}))

        return left

    parts = [replace(part, ranks=(rank,), meet=("10.0.0.1", 4711)) for rank, part in enumerate(PARTS)]
    fakes = {part.host: FakeTransport(part.host, answer=answer(part.host)) for part in parts}
    assert DirectBackend().verify(replace(REQUEST, hosts=tuple(parts)), fakes) == []
    assert asked == {"pc1": 4711, "pc2": None}
