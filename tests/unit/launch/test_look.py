"""One host that hangs keeps nobody waiting, and is told of as not answering."""

import json
import threading
import time
from dataclasses import replace
from pathlib import PurePath

import pytest

from gangline.errors import GanglineError, HostUnreachable
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.direct import DirectBackend
from gangline.launch.poll import HostPoller, look, outlives_agent
from tests.fakes.transport import FakeTransport, Scripted

PARTS = tuple(
    HostRequest(host=host, folder=f"/srv/{host}", rank_files="/srv", argv=(), env={}) for host in ("pc1", "pc2")
)
REQUEST = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=PARTS)


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
    looks = HostPoller(patience_s=0.2)
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


def test_a_host_that_somebody_else_has_waited_for_is_not_waited_for_again(hosts):
    looks = HostPoller(patience_s=20)
    assert phases(looks, hosts) == ["starting", "starting"]
    hosts["pc2"].gate.clear()
    looks.lost(PARTS[1])
    begun = time.monotonic()
    assert phases(looks, hosts) == ["starting", "unreachable"]
    assert time.monotonic() - begun < 5


def test_since_when_it_is_silent_does_not_change_with_every_look(hosts):
    looks = HostPoller(patience_s=0.2)
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
    for name in ("exit.json", "status.json", "agent.json"):
        hosts["pc1"].write(PurePath("/srv/pc1", name), text)
    assert look(PARTS[0], hosts["pc1"]).phase == "starting"


def test_what_the_host_agent_says_is_taken_over(hosts):
    start = {
        "launcher": True,
        "met": True,
        "ranks": {
            "10": {"torch": True, "met": True, "phase": "joining", "step": 0, "collectives": 3, "same_s": 1.5},
            "9": {"torch": False, "met": False, "phase": None, "step": None},
        },
        "waits_for": ["10.77.0.10:51116"],
    }  # fmt: skip
    record = {"pid": 4711, "start_ticks": 99, "beat": 7, "epoch": 2, "failures": [], "start": start}
    hosts["pc1"].write(PurePath("/srv/pc1/status.json"), json.dumps(record).encode())
    words = ["4711", "(a (b) c)", "S", *["0"] * 18, "99", "0"]
    hosts["pc1"].write(PurePath("/proc/4711/stat"), " ".join(words).encode())
    status = look(PARTS[0], hosts["pc1"])
    assert (status.phase, status.beat, status.epoch) == ("running", 7, 2)
    assert [(sign.rank, sign.phase) for sign in status.signs.ranks] == [(9, None), (10, "joining")]
    assert [(sign.step, sign.collectives, sign.same_s) for sign in status.signs.ranks] == [(None,) * 3, (0, 3, 1.5)]
    assert status.signs.waits_for == ("10.77.0.10:51116",)


@pytest.mark.parametrize("wrong", [
    '"step": -1', '"step": 1.5', '"step": "7"', '"step": true', '"collectives": 1e300', '"collectives": [1]',
    f'"collectives": {1 << 63}', '"same_s": -0.1', '"same_s": NaN', '"same_s": Infinity', '"same_s": "1"',
    f'"same_s": 1{"0" * 400}', '"same_s": true',
])  # fmt: skip
def test_numbers_of_a_rank_that_cannot_be_are_not_believed(hosts, wrong):
    row = '{"torch": true, "met": true, "phase": "data", ' + wrong + "}"
    start = '{"launcher": true, "met": true, "ranks": {"0": ' + row + '}, "waits_for": []}'
    said = f'{{"pid": 4711, "start_ticks": 99, "start": {start}}}'
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), said.encode())
    hosts["pc2"].write(PurePath("/proc/4711/stat"), STAT)
    assert HostPoller().at(REQUEST, hosts)[1].phase == "unreachable"


ENDED = {"returncode": 0, "error": None, "reason": "broken", "failures": [], "console_tail": []}


def test_a_host_rests_as_long_as_the_host_agent_that_says_so_runs(hosts):
    hosts["pc1"].write(PurePath("/srv/pc1/exit.json"), json.dumps(ENDED).encode())
    assert not look(PARTS[0], hosts["pc1"]).rests
    hosts["pc1"].write(PurePath("/srv/pc1/resting.json"), b'{"pid": 4711, "start_ticks": 99}')
    assert not look(PARTS[0], hosts["pc1"]).rests
    hosts["pc1"].write(PurePath("/proc/4711/stat"), STAT)
    status = look(PARTS[0], hosts["pc1"])
    assert (status.phase, status.reason, status.rests) == ("ended", "broken", True)


@pytest.mark.parametrize("text", [b"[1]", b"7", b'{"pid": "x", "start_ticks": 99}', b"{}"])
def test_who_rests_is_not_believed_either(hosts, text):
    hosts["pc2"].write(PurePath("/srv/pc2/exit.json"), json.dumps(ENDED).encode())
    hosts["pc2"].write(PurePath("/srv/pc2/resting.json"), text)
    assert HostPoller().at(REQUEST, hosts)[1].phase == "unreachable"


@pytest.mark.parametrize(("now", "resting", "word"), [
    (False, False, "stop"), (True, False, "kill"), (False, True, "yield"), (True, True, "break"),
])  # fmt: skip
def test_a_host_that_rests_is_told_like_one_that_runs(hosts, now, resting, word):
    host = hosts["pc1"]
    host.write(PurePath("/srv/pc1/exit.json"), json.dumps(ENDED).encode())
    host.write(PurePath("/srv/pc1/resting.json"), b'{"pid": 4711, "start_ticks": 99}')
    host.write(PurePath("/proc/4711/stat"), STAT)
    assert DirectBackend().stop(REQUEST.on({"pc1"}), hosts, now=now, resting=resting, epoch=3) == []
    assert json.loads(host.read(PurePath("/srv/pc1/order-3.json"))) == {
        "schema_version": "1.0",
        "epoch": 3,
        "order": word,
    }
    assert host.calls == []


@pytest.mark.parametrize(("now", "is_reaped"), [(True, True), (False, False)])
def test_where_a_host_agent_has_ended_what_it_may_have_left_is_ended_when_the_gang_is_broken(hosts, now, is_reaped):
    host = hosts["pc1"]
    host.write(PurePath("/srv/pc1/exit.json"), json.dumps(ENDED).encode())
    assert DirectBackend().stop(REQUEST.on({"pc1"}), hosts, now=now, resting=True) == []
    assert [call.argv[-1] for call in host.calls] == ["reap"] * is_reaped


DEEP = b"[" * 10**5
HOSTILE = {
    "a list": b"[1]",
    "a number": b"7",
    "a text": b'"pid"',
    "true": b"true",
    "nested deeply": DEEP + b"]" * 10**5,
    "nested deeply without an end": DEEP,
    "nested deeply inside": b'{"pid": ' + DEEP + b"]" * 10**5 + b"}",
    "no pid": b"{}",
    "a text for a pid": b'{"pid": "x", "start_ticks": 99}',
    "a path for a pid": b'{"pid": "../../etc/passwd\\u0000", "start_ticks": 99}',
    "a very long pid": b'{"pid": "' + b"9" * 10**5 + b'", "start_ticks": 99}',
    "a list for a pid": b'{"pid": [4711], "start_ticks": 99}',
    "a fraction for a pid": b'{"pid": 4711.0, "start_ticks": 99}',
    "endless for a pid": b'{"pid": Infinity, "start_ticks": 99}',
    "no ticks": b'{"pid": 4711}',
    "a list for a beat": b'{"pid": 4711, "start_ticks": 99, "beat": [1]}',
    "a text for an epoch": b'{"pid": 4711, "start_ticks": 99, "epoch": "99"}',
    "failures that are a number": b'{"pid": 4711, "start_ticks": 99, "failures": 7}',
    "a start that is a list": b'{"pid": 4711, "start_ticks": 99, "start": []}',
    "ranks that are a list": b'{"pid": 4711, "start_ticks": 99, "start": {"launcher": 1, "met": 1, "ranks": [], "waits_for": []}}',
}  # fmt: skip
STAT = " ".join(["4711", "(a)", "S", *["0"] * 18, "99", "0"]).encode()


@pytest.fixture(params=HOSTILE)
def hostile(request, hosts):
    """What a host says that is no status of a host agent."""
    hosts["pc2"].write(PurePath("/proc/4711/stat"), STAT)
    return HOSTILE[request.param]


def test_a_hostile_status_is_unreachable_and_the_others_are_not(hosts, hostile):
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), hostile)
    fine, lying = HostPoller().at(REQUEST, hosts)
    assert fine.phase == "starting"
    assert lying.phase == "unreachable"
    assert lying.why.startswith("what it says cannot be understood")


def test_a_hostile_status_does_not_tell_whether_ranks_outlive_their_host_agent(hosts, hostile):
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), hostile)
    with pytest.raises(GanglineError, match="what pc2 says cannot be understood") as caught:
        outlives_agent(PARTS[1], hosts["pc2"])
    assert caught.value.seen
    assert caught.value.fix


def test_a_hostile_record_of_a_rank_is_told_by_its_host(hosts, hostile):
    gone = {"pid": 1, "start_ticks": 1}
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), json.dumps(gone).encode())
    hosts["pc2"].write(PurePath("/srv/rank-0.pid"), hostile)
    assert look(PARTS[1], hosts["pc2"]).phase == "lost"
    if b"99, " in hostile:  # pid and ticks are right, what else it says is not asked for
        assert outlives_agent(PARTS[1], hosts["pc2"])
        return
    with pytest.raises(GanglineError, match="what pc2 says cannot be understood"):
        outlives_agent(PARTS[1], hosts["pc2"])


@pytest.mark.parametrize("stat", [b"4711", b"4711 (a) S 0 0", b")", b"4711 (a) S " + b"x " * 40])
def test_a_process_that_cannot_be_understood_is_told_by_its_host(hosts, stat):
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), b'{"pid": 4711, "start_ticks": 99}')
    hosts["pc2"].write(PurePath("/proc/4711/stat"), stat)
    assert HostPoller().at(REQUEST, hosts)[1].phase == "unreachable"
    with pytest.raises(GanglineError, match="what pc2 says cannot be understood"):
        outlives_agent(PARTS[1], hosts["pc2"])


@pytest.mark.parametrize("host_agent", [b"[1]", b"7", DEEP, b'{"torchrun_pid": "x"}', b'{"torchrun_pid": 5}'])
def test_a_hostile_host_agent_is_told_by_its_host(hosts, host_agent):
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), b'{"pid": 1, "start_ticks": 1}')
    hosts["pc2"].write(PurePath("/srv/pc2/agent.json"), host_agent)
    with pytest.raises(GanglineError, match="what pc2 says cannot be understood"):
        outlives_agent(PARTS[1], hosts["pc2"])


def test_a_file_that_cannot_be_read_is_told_by_its_host(hosts):
    def read(*_words, **_how):
        raise PermissionError(13, "pc2: Permission denied", "/srv/pc2/status.json")

    hosts["pc2"].read = read
    with pytest.raises(GanglineError, match="pc2") as caught:
        outlives_agent(PARTS[1], hosts["pc2"])
    assert "/srv/pc2/status.json" in caught.value.seen


def test_a_rank_that_outlives_its_host_agent_is_seen(hosts):
    hosts["pc2"].write(PurePath("/srv/pc2/status.json"), b'{"pid": 1, "start_ticks": 1}')
    hosts["pc2"].write(PurePath("/srv/pc2/agent.json"), b'{"pid": 1, "start_ticks": 1, "torchrun_pid": null}')
    assert not outlives_agent(PARTS[1], hosts["pc2"])
    hosts["pc2"].write(PurePath("/srv/rank-0.pid"), b'{"pid": 4711, "start_ticks": 99}')
    assert not outlives_agent(PARTS[1], hosts["pc2"])
    hosts["pc2"].write(PurePath("/proc/4711/stat"), STAT)
    assert outlives_agent(PARTS[1], hosts["pc2"])


@pytest.mark.parametrize(
    "text", [b"[]", b"{}", b'"ended"', b'{"returncode": "soon"}', b'{"returncode": 0, "failures": 7}']
)
def test_a_host_whose_files_cannot_be_understood_is_unreachable_and_the_others_are_not(hosts, text):
    hosts["pc2"].write(PurePath("/srv/pc2/exit.json"), text)
    fine, lying = HostPoller().at(REQUEST, hosts)
    assert fine.phase == "starting"
    assert lying.phase == "unreachable"
    assert lying.why.startswith("what it says cannot be understood")


def test_failures_of_a_host_have_all_that_is_asked_for_later(hosts):
    failure = {"rank": 0, "pid": 1, "time": 2.0, "ordered": False, "error": {}, "exit": 1, "log": "l", "log_tail": []}
    failure["oom"] = {"line": "Killed process 1", "cgroup": None, "limit_bytes": 1 << 30, "what": "else"}
    failure["stack"] = {"pid": 1, "state": "S", "where": "a\x1b[2J (b.py:1)", "waits": "yes", "stack": ["a"] * 99}
    record = {"returncode": 1, "error": None, "reason": "finished", "failures": [failure], "console_tail": []}
    record["left_early"] = [3]
    hosts["pc1"].write(PurePath("/srv/pc1/exit.json"), json.dumps(record).encode())
    del failure["time"]
    hosts["pc2"].write(PurePath("/srv/pc2/exit.json"), json.dumps(record).encode())
    whole, lying = HostPoller().at(REQUEST, hosts)
    assert whole.failures[0]["error"] == {"what": "", "seen": "", "fix": ""}
    oom = {"line": "Killed process 1", "cgroup": None, "limit_bytes": 1 << 30, "memory_bytes": None}
    assert whole.failures[0]["oom"] == oom
    stack = {"pid": 1, "state": "S", "where": "a?[2J (b.py:1)", "waits": False, "stack": ["a"] * 12}
    assert (whole.failures[0]["stack"], whole.left_early) == (stack, (3,))
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
