"""A host agent whose beat does not change stands still, whatever its host answers."""

from gangline.launch.backend import HostStatus
from gangline.supervise.gang_view import Heartbeats


class Watch:
    """Heartbeats with a clock that a test moves."""

    def __init__(self):
        self.now = 0.0
        self.heartbeats = Heartbeats(stall_s=60.0, clock=lambda: self.now)

    def see(self, beat, *, at, phase="running"):
        self.now = at
        return [event for event, _ in self.heartbeats.note([HostStatus(host="pc2", phase=phase, beat=beat)])]


def test_a_beat_that_stays_is_told_once_and_so_is_its_return():
    watch = Watch()
    assert [watch.see(7, at=0), watch.see(7, at=59)] == [[], []]
    assert watch.see(7, at=61) == ["stalled"]
    assert watch.see(7, at=300) == []
    assert watch.heartbeats.stalled == {"pc2"}
    assert watch.see(8, at=301) == ["recovered"]
    assert watch.heartbeats.stalled == set()


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
    assert watch.heartbeats.as_evidence(error) == error
    watch.see(7, at=0)
    watch.see(7, at=61)
    assert watch.heartbeats.as_evidence(error)["seen"].startswith("the gangline agent on pc2 has not responded since ")
