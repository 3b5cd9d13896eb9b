"""Hosts that get ready beside a run: what is done on them, by a clock that a test moves."""

import concurrent.futures
import threading

import pytest

from gangline.errors import RunFailed
from gangline.launch.backend import HostRequest, HostStatus
from gangline.supervise import standby as module
from gangline.supervise.standby import Standbys, Steps

IMPORTING = {"phase": "ended", "returncode": 0, "rests": True}
READY = {**IMPORTING, "ready": True}


class Hosts:
    """What happens on hosts; a test says how they stand."""

    def __init__(self):
        self.now = 1000.0
        self.begun, self.ended, self.told = [], [], []
        self.stands, self.problem = IMPORTING, None
        self.answers = threading.Event()
        self.answers.set()
        self.standbys = Standbys(Steps(begin=self.begin, look=self.look, end=self.end), clock=lambda: self.now)

    def begin(self, host):
        self.begun.append(host)
        if self.problem:
            raise self.problem
        return HostRequest(host=host, folder=f"/{host}/{len(self.begun)}", rank_files="/", argv=(), env={})

    def look(self, part):
        self.answers.wait(20)
        return HostStatus(host=part.host, **self.stands)

    def end(self, part):
        self.ended.append(part.folder)

    def pass_time(self, seconds, *hosts):
        """Look every second, and let the work in the background end."""
        for _ in range(seconds):
            self.told += self.standbys.look(hosts)
            concurrent.futures.wait([future for _, future in self.standbys._work._running.values()], timeout=20)
            self.now += 1.0

    def events(self):
        return [event for event, _ in self.told]


@pytest.fixture
def hosts():
    return Hosts()


def test_a_host_is_ready_once_its_processes_are(hosts):
    hosts.pass_time(20, "pc3")
    assert (hosts.begun, hosts.standbys.ready(), hosts.events()) == (["pc3"], [], ["preparing"])
    hosts.stands = READY
    hosts.pass_time(3, "pc3")
    assert (hosts.begun, hosts.standbys.ready()) == (["pc3"], ["pc3"])


def test_one_that_is_not_ready_in_time_is_ended_and_begins_again_after_a_pause(hosts):
    hosts.pass_time(600, "pc3")
    assert hosts.ended == []
    hosts.pass_time(6, "pc3")
    assert (hosts.ended, hosts.begun) == (["/pc3/1"], ["pc3"])
    assert hosts.told[-1][1]["what"].endswith("it was not ready after 600 s")
    hosts.pass_time(40, "pc3")
    assert hosts.begun == ["pc3", "pc3"]


def test_pauses_grow_and_only_the_first_failure_is_told(hosts):
    hosts.problem = RunFailed("pc3: no room", fix="make room")
    hosts.pass_time(400, "pc3")
    assert len(hosts.begun) == 4  # after 30, 60, 120 s
    assert hosts.events() == ["preparing", "not-ready"]
    assert module.PAUSE_S * 2**20 > module.LONGEST_PAUSE_S


def test_why_its_processes_ended_is_told(hosts):
    hosts.stands = {"phase": "ended", "returncode": 1, "console_tail": ("Traceback", "No module named 'torch'", "")}
    hosts.pass_time(4, "pc3")
    assert hosts.told[-1][1]["what"].endswith("goes on without it: No module named 'torch'")


def test_one_that_falls_silent_is_not_ready_and_is_asked_again_when_it_answers(hosts):
    hosts.stands = READY
    hosts.pass_time(4, "pc3")
    hosts.pass_time(5)
    assert hosts.standbys.ready() == []
    hosts.pass_time(4, "pc3")
    assert (hosts.begun, hosts.standbys.ready()) == (["pc3", "pc3"], ["pc3"])
    assert hosts.events() == ["preparing"]


def test_one_that_comes_back_while_a_look_from_before_still_hangs_begins_anew_after_it(hosts):
    hosts.stands = READY
    hosts.pass_time(4, "pc3")
    hosts.answers.clear()
    hosts.told += hosts.standbys.look(["pc3"])
    for back in ([], ["pc3"], ["pc3"]):
        hosts.told += hosts.standbys.look(back)
        hosts.now += 1.0
    assert hosts.begun == ["pc3"]
    hosts.answers.set()
    hosts.pass_time(4, "pc3")
    assert (hosts.begun, hosts.standbys.ready()) == (["pc3", "pc3"], ["pc3"])


def test_what_may_wait_is_known_at_the_end_and_not_what_has_joined(hosts):
    hosts.stands = READY
    hosts.pass_time(4, "pc2", "pc3")
    hosts.standbys.forget(["pc2"])
    assert [part.host for part in hosts.standbys.end()] == ["pc3"]
    assert hosts.standbys.ready() == []
