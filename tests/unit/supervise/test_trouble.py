"""A full disk is told once, with its host, whether its agent can write that or has to be asked; and it is the cause."""

import json
from dataclasses import replace

import pytest

from gangline.launch.backend import HostStatus, HostTrouble
from gangline.supervise.trouble import ASK_EVERY_S, HostTroubles
from tests.fakes.transport import FakeTransport, Scripted
from tests.unit.supervise.test_board import RANKS, Clock, request
from tests.waiting import wait_until

FULL = HostTrouble(point="/", kind="full", words="the disk at / is full: 0 B of 98 GiB are free")
SILENT = HostTrouble(point="/mnt/nas", kind="silent", words="the file server of /mnt/nas (nas:/x) does not answer")
ERROR = {"what": "a save failed", "seen": "No space left on device", "fix": "gangline logs"}


class Lab:
    """Three hosts; what each answers when it is asked."""

    def __init__(self):
        self.clock = Clock()
        self.answer = [{"point": FULL.point, "kind": FULL.kind, "words": FULL.words}]
        self.hosts = {name: FakeTransport(name, answer=self.say) for name in RANKS}
        self.troubles = HostTroubles(request(), self.hosts, clock=self.clock)

    def say(self, call):
        assert call.argv == ("gangline-agent", "room")
        assert json.loads(call.stdin)["request"]["folder"]
        return Scripted(stdout=json.dumps({"troubles": self.answer}))

    def note(self, *, frozen=(), **troubles):
        statuses = [HostStatus(host=host, phase="running", troubles=troubles.get(host, ())) for host in RANKS]
        return [(event, details["what"]) for event, details in self.troubles.note(statuses, frozen=frozen)]

    def asked(self):
        wait_until(
            lambda: all(future.done() for _, future in self.troubles._asking._running.values()), "it has answered"
        )


@pytest.fixture
def lab():
    return Lab()


def test_what_a_host_agent_says_is_told_once_and_its_end_too(lab):
    assert lab.note() == []
    assert lab.note(pc2=(FULL,)) == [("trouble", "pc2: the disk at / is full: 0 B of 98 GiB are free")]
    assert lab.note(pc2=(replace(FULL, words="the disk at / is full: 8 KiB of 98 GiB are free"),)) == []
    assert lab.note(pc2=(FULL, SILENT)) == [("trouble", f"pc2: {SILENT.words}")]
    assert lab.note() == [
        ("trouble-over", "pc2: / has room again"),
        ("trouble-over", "pc2: /mnt/nas answers again"),
    ]


def test_a_host_whose_agent_cannot_write_is_asked(lab):
    assert lab.note(frozen={"pc3"}) == []
    lab.asked()
    assert lab.note(frozen={"pc3"}) == [("trouble", f"pc3: {FULL.words}")]
    assert len(lab.hosts["pc3"].calls) == 1
    lab.clock.now += ASK_EVERY_S
    lab.answer = []
    lab.note(frozen={"pc3"})
    lab.asked()
    assert lab.note(frozen={"pc3"}) == [("trouble-over", "pc3: / has room again")]


@pytest.mark.parametrize("said", ["", "[]", '{"troubles": 7}', '{"troubles": [{"point": 1}]}', '{"x": 1}'])
def test_a_host_that_answers_nonsense_has_no_trouble(lab, said):
    lab.hosts["pc3"].answer = lambda _call: Scripted(stdout=said)
    lab.note(frozen={"pc3"})
    lab.asked()
    assert lab.note(frozen={"pc3"}) == []


def test_the_error_of_a_run_that_fails_meanwhile_names_it(lab):
    assert lab.troubles.as_evidence(ERROR) == ERROR
    lab.note(pc2=(FULL,))
    error = lab.troubles.as_evidence(ERROR)
    assert error["seen"] == f"No space left on device\npc2: {FULL.words}"
    assert error["fix"] == "free some space on pc2; gangline logs"
