"""A host that falls silent is told of, and so is its return."""

from gangline.launch.backend import HostStatus
from gangline.supervise.gang_view import Presence
from tests.unit.supervise.test_board import Clock


def here(host):
    return HostStatus(host=host, phase="running")


def gone(host):
    return HostStatus(host=host, phase="unreachable", why="no answer for 6 s")


def test_silence_and_return_are_news_once():
    clock = Clock()
    presence = Presence(notice_s=5.0, clock=clock)

    def note(*statuses, at):
        clock.now = at
        return [(event, details["host"]) for event, details in presence.note(statuses)]

    assert note(here("pc1"), here("pc2"), at=0.0) == []
    assert note(here("pc1"), gone("pc2"), at=1.0) == []
    assert note(here("pc1"), gone("pc2"), at=6.0) == [("unreachable", "pc2")]
    assert note(here("pc1"), gone("pc2"), at=7.0) == []
    assert presence.silence_s() == 6.0
    assert note(here("pc1"), here("pc2"), at=9.0) == [("reachable", "pc2")]
    assert presence.silence_s() == 0.0


def test_a_connection_that_is_soon_back_is_no_news():
    clock = Clock()
    presence = Presence(notice_s=5.0, clock=clock)
    assert list(presence.note([gone("pc2")])) == []
    clock.now = 4.0
    assert list(presence.note([here("pc2")])) == []


def test_it_is_told_since_when_and_why_and_how_long_it_was():
    clock = Clock()
    presence = Presence(notice_s=5.0, clock=clock)
    list(presence.note([gone("pc2")]))
    clock.now = 8.04
    ((_, details),) = presence.note([gone("pc2")])
    assert details["why"] == "no answer for 6 s"
    assert details["since"].endswith("Z")
    ((_, details),) = presence.note([here("pc2")])
    assert details == {"host": "pc2", "seconds": 8.0}
