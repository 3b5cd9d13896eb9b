"""A start that is stuck is said to be, with what a probe found, and is given up in the end."""

import json
from dataclasses import replace

import pytest

from gangline.runs.cluster import Cluster, Host
from gangline.supervise.startup import StartFollower
from tests.fakes.transport import FakeTransport, Scripted
from tests.unit.supervise.test_board import PLACES, RANKS, Clock, all_at, rank, request, status
from tests.waiting import wait_until

CLUSTER = Cluster(
    name="home",
    hosts=tuple(
        Host(name=name, workdir="/srv", python="python3", transport="ssh", address=address)
        for address, name in PLACES.items()
    ),
)


class Lab:
    """Three hosts that answer probes as they are told."""

    def __init__(self, program="worker"):
        self.clock = Clock()
        self.outcome = "timed out"
        self.transports = {name: FakeTransport(name, answer=self.answer) for name in PLACES.values()}
        parts = tuple(replace(part, meet=("10.77.0.10", 29500)) for part in request(program).hosts)
        whole = replace(request(program), hosts=parts)
        self.start = StartFollower(whole, CLUSTER, self.transports, clock=self.clock)

    def answer(self, call):
        assert call.argv == ("gangline-agent", "connect")
        targets = json.loads(call.stdin)["targets"]
        return Scripted(stdout=json.dumps({"outcomes": [self.outcome for _ in targets]}))

    def note(self, *statuses, at):
        self.clock.now = at
        return list(self.start.note(statuses))

    def probed(self):
        wait_until(
            lambda: all(future.done() for _, future in self.start._probes._running.values()), "the probes have ended"
        )


@pytest.fixture
def lab():
    return Lab()


@pytest.fixture
def program_lab():
    return Lab("command")


STUCK = (status("pc1"), status("pc2"), status("pc3", met=False))


def test_all_join_and_that_is_told_once(lab):
    assert lab.note(*STUCK, at=1.0) == []
    assert lab.note(*all_at("joined"), at=4.2) == [("joined", {"seconds": 4.2})]
    assert lab.note(*all_at("data"), at=5.0) == []
    assert lab.start.to_json()["done"]
    assert lab.start.failure() is None


def test_who_is_behind_is_told_with_what_the_probe_says_and_again_when_that_changes(lab):
    assert lab.note(*STUCK, at=14.0) == []
    ((event, details),) = lab.note(*STUCK, at=15.0)
    assert event == "waiting"
    assert "torchrun on pc3 is not connected to pc1 at 10.77.0.10, port 29500" in details["what"]
    lab.probed()
    ((_, details),) = lab.note(*STUCK, at=16.0)
    assert details["what"].endswith(
        "a connection from pc3 to pc1 (10.77.0.10, port 29500): timed out: packets are dropped on the way; suspect a firewall"
    )
    assert lab.note(*STUCK, at=17.0) == []
    assert lab.start.to_json()["sentence"].startswith("0 of 4 ranks have joined after 17 s")
    assert [len(transport.calls) for transport in lab.transports.values()] == [0, 0, 1]


def test_it_is_given_up_with_that_as_the_cause(lab):
    lab.note(*STUCK, at=15.0)
    lab.probed()
    lab.note(*STUCK, at=16.0)
    assert lab.start.failure() is None
    lab.note(*STUCK, at=100.0)
    lab.probed()
    lab.note(*STUCK, at=106.0)
    failure = lab.start.failure()
    assert "torchrun on pc3 is not connected to pc1" in failure.what
    assert "timed out" in failure.what
    assert failure.fix.startswith("let the hosts of the cluster reach each other")


def test_a_result_of_an_earlier_stage_is_not_told(lab):
    lab.note(*STUCK, at=15.0)
    lab.probed()
    lab.note(status("pc1"), status("pc2"), status("pc3"), at=16.0)
    assert lab.start.board.stage == "python"
    assert "connection" not in lab.start.to_json()["sentence"]
    lab.note(*all_at("joining"), at=17.0)
    assert "connection" not in lab.start.to_json()["sentence"]


def test_an_old_result_is_not_told_and_one_verdict_is_enough(lab):
    stuck = (*STUCK[:2], status("pc3", met=False, waits_for=("10.77.0.10:29500",)))
    lab.note(*stuck, at=15.0)
    lab.probed()
    lab.outcome = "refused"
    lab.note(*stuck, at=16.0)
    said = lab.start.to_json()["sentence"]
    assert ("timed out" in said, "gets no answer" in said) == (True, False)
    lab.note(*stuck, at=46.0)
    assert "timed out" not in lab.start.to_json()["sentence"]
    lab.probed()
    lab.note(*stuck, at=47.0)
    assert "refused" in lab.start.to_json()["sentence"]


def test_no_port_is_tried_before_somebody_can_listen_there(lab):
    waiting = (status("pc1", met=False, idle_s=0.0), *(status(host, met=False, idle_s=60.0) for host in ("pc2", "pc3")))
    lab.note(*waiting, at=100.0)
    lab.note(*waiting, at=120.0)
    assert not any(transport.calls for transport in lab.transports.values())
    # the head listens, and the launcher of pc3 still works on its way there
    lab.note(*STUCK[:2], status("pc3", met=False, idle_s=0.0), at=121.0)
    assert not any(transport.calls for transport in lab.transports.values())


def test_a_connection_that_works_is_no_verdict(lab):
    lab.outcome = "open"
    lab.note(*STUCK, at=15.0)
    lab.probed()
    lab.note(*STUCK, at=16.0)
    assert lab.start.to_json()["sentence"].endswith("; a new connection from pc3 to pc1 (10.77.0.10, port 29500) works")


def test_figures_that_grow_are_no_news(lab):
    def importing(idle_s):
        return *all_at("joining")[:2], status("pc3", rank(3, idle_s=idle_s))

    assert [len(lab.note(*importing(idle), at=at)) for at, idle in ((15.0, 0.0), (20.0, 1.0), (40.0, 15.0), (45.0, 20.0))] == [
        1, 0, 1, 0,
    ]  # fmt: skip


def test_what_a_start_that_is_given_up_has_waited_for_is_told_with_its_time(lab):
    lab.note(*all_at("joining")[:2], status("pc3", rank(3, idle_s=0.0)), at=15.0)
    lab.note(*all_at("joining")[:2], status("pc3", rank(3, idle_s=100.0)), at=115.0)
    failure = lab.start.failure()
    assert "rank 3 on pc3 has done nothing for 100 s" in failure.what
    assert failure.seen == (
        "waited for pc3 at the stage 'torch' for 100 s, the last 100 s without any progress there; "
        "the limit is 90 s without progress, 3600 s in all"
    )


def test_ports_that_give_no_answer_are_tried_from_where_they_give_none(lab):
    statuses = (
        *all_at("joining")[:1],
        status("pc2", rank(1, "joining"), rank(2, "joining"), waits_for=("10.77.0.10:51116",)),
        status("pc3", rank(3, "joining")),
    )
    lab.note(*statuses, at=20.0)
    lab.probed()
    lab.note(*statuses, at=21.0)
    assert [len(transport.calls) for transport in lab.transports.values()] == [0, 1, 0]
    assert "from pc2 to pc1 (10.77.0.10, port 51116): timed out" in lab.start.to_json()["sentence"]


def test_a_host_that_cannot_be_asked_is_told_too(lab):
    lab.transports["pc3"].reachable = False
    lab.note(*STUCK, at=15.0)
    lab.probed()
    ((_, details),) = lab.note(*STUCK, at=16.0)
    assert details["what"].endswith("pc3 cannot be asked: pc3 does not answer")


def test_ranks_of_a_program_that_is_not_ours_are_told_when_they_wait_for_each_other_later(program_lab):
    lab = program_lab
    everybody = [status(host, *(rank(each, torch=True, met=True) for each in RANKS[host])) for host in RANKS]
    stuck = status("pc3", rank(3, torch=True), waits_for=("10.77.0.10:51116",))
    assert lab.note(*everybody, at=8.0) == [("joined", {"seconds": 8.0})]
    assert lab.note(*everybody, at=200.0) == []
    ((event, details),) = lab.note(*everybody[:2], stuck, at=300.0)
    assert (event, lab.start.done) == ("waiting", False)
    assert "rank 3 on pc3 has not joined; pc3 gets no answer from pc1" in details["what"]
    lab.probed()
    ((_, details),) = lab.note(*everybody[:2], stuck, at=301.0)
    assert "from pc3 to pc1 (10.77.0.10, port 51116): timed out" in details["what"]
    assert lab.note(*everybody, at=302.0) == [("joined", {"seconds": 302.0})]
    assert (lab.start.done, lab.start.to_json()["sentence"]) == (True, None)


def test_the_board_is_written_every_second(lab):
    due = []
    for at in (0.0, 0.3, 0.9, 1.0, 1.9, 2.1):
        lab.clock.now = at
        due.append(lab.start.is_due())
    assert due == [True, False, False, True, False, True]
