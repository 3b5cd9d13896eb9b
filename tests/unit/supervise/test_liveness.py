"""A host that falls silent is reported, and its return; a host agent whose beat does not change does not respond."""

from gangline.launch.backend import HostStatus
from gangline.supervise.liveness import Liveness
from tests.unit.supervise.test_board import Clock


def here(host):
    return HostStatus(host=host, phase="running")


def gone(host):
    return HostStatus(host=host, phase="unreachable", why="no answer for 6 s")


def test_silence_and_return_are_news_once():
    clock = Clock()
    liveness = Liveness(notice_s=5.0, clock=clock)

    def note(*statuses, at):
        clock.now = at
        return [(event, details["host"]) for event, details in liveness.note(statuses)]

    assert note(here("pc1"), here("pc2"), at=0.0) == []
    assert note(here("pc1"), gone("pc2"), at=1.0) == []
    assert note(here("pc1"), gone("pc2"), at=6.0) == [("unreachable", "pc2")]
    assert note(here("pc1"), gone("pc2"), at=7.0) == []
    assert liveness.silence_s() == 6.0
    assert note(here("pc1"), here("pc2"), at=9.0) == [("reachable", "pc2")]
    assert liveness.silence_s() == 0.0


def test_a_connection_that_is_soon_back_is_no_news():
    clock = Clock()
    liveness = Liveness(notice_s=5.0, clock=clock)
    assert list(liveness.note([gone("pc2")])) == []
    clock.now = 4.0
    assert list(liveness.note([here("pc2")])) == []


def test_it_is_told_since_when_and_why_and_how_long_it_was():
    clock = Clock()
    liveness = Liveness(notice_s=5.0, clock=clock)
    list(liveness.note([gone("pc2")]))
    clock.now = 8.04
    ((_, details),) = liveness.note([gone("pc2")])
    assert details["why"] == "no answer for 6 s"
    assert details["since"].endswith("Z")
    ((_, details),) = liveness.note([here("pc2")])
    assert details == {"host": "pc2", "seconds": 8.0}


class Watch:
    """The liveness of a host by a clock that a test moves."""

    def __init__(self):
        self.now = 0.0
        self.liveness = Liveness(stall_s=60.0, clock=lambda: self.now)

    def see(self, beat, *, at, phase="running"):
        self.now = at
        return [event for event, _ in self.liveness.note([HostStatus(host="pc2", phase=phase, beat=beat)])]


def test_a_beat_that_stays_is_told_once_and_so_is_its_return():
    watch = Watch()
    assert [watch.see(7, at=0), watch.see(7, at=59)] == [[], []]
    assert watch.see(7, at=61) == ["stalled"]
    assert watch.see(7, at=300) == []
    assert watch.liveness.stalled == {"pc2"}
    assert watch.see(8, at=301) == ["recovered"]
    assert watch.liveness.stalled == set()


def test_the_time_in_which_a_host_does_not_answer_does_not_count():
    watch = Watch()
    watch.see(7, at=0)
    watch.see(None, at=30, phase="unreachable")
    assert watch.see(7, at=100) == []
    assert watch.see(7, at=159) == []
    assert watch.see(7, at=160) == ["stalled"]


def test_one_that_has_ended_or_tells_no_beat_does_not_stand_still():
    watch = Watch()
    watch.see(7, at=0)
    assert watch.see(None, at=100, phase="ended") == []
    assert watch.see(None, at=200) == []


def test_an_error_tells_of_it():
    watch = Watch()
    error = {"what": "it failed", "seen": "", "fix": ""}
    assert watch.liveness.as_evidence(error) == error
    watch.see(7, at=0)
    watch.see(7, at=61)
    assert watch.liveness.as_evidence(error)["seen"].startswith("the gangline agent on pc2 has not responded since ")
