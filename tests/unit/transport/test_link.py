"""The connection of a transport: one time limit for a host that is dead, another try for one that comes back."""

import errno

import pytest

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport import connection
from gangline.transport.connection import HostLink


class Lane:
    """A connection that is lost at once, unless it has an answer."""

    def __init__(self, **answer):
        self.answer = answer
        self.is_open = bool(answer)

    def ask(self, _body, **_more):
        return self.answer, b""

    @property
    def channel(self):
        return self

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def tries(monkeypatch):
    """What each try to connect comes to; the rest finds nobody."""
    tries = []
    answers = []

    def connect(*_words, **_more):
        tries.append(1)
        if answers:
            return answers.pop(0)
        raise HostUnreachable("pc1 does not answer", seen="timed out", fix="ping", reason="unreachable")

    monkeypatch.setattr(connection, "connect", connect)
    return tries, answers


@pytest.fixture
def way():
    return HostLink(Host(name="pc1", workdir="/w", python=""), "", lambda: b"", None)


def ask(way):
    with pytest.raises(HostUnreachable) as caught:
        way.connection()
    return caught.value


def test_a_dead_host_costs_one_time_limit_and_its_reason_is_kept(tries, way):
    first, second = ask(way), ask(way)
    assert len(tries[0]) == 1
    assert first is not second
    assert (second.what, second.seen, second.fix, second.reason) == (
        "pc1 does not answer",
        "timed out",
        "ping",
        "unreachable",
    )


def test_after_a_while_it_is_tried_again(tries, way, monkeypatch):
    ask(way)
    monkeypatch.setattr(connection, "REPEAT_S", 0.0)
    ask(way)
    assert len(tries[0]) == 2


def test_after_close_it_is_tried_again(tries, way):
    ask(way)
    way.close()
    ask(way)
    assert len(tries[0]) == 2


def test_a_host_that_was_there_may_be_back_any_moment(tries, way):
    tries[1].append(Lane())
    way.connection()
    ask(way)
    ask(way)
    assert len(tries[0]) == 3


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, OSError), (errno.ENOENT, FileNotFoundError), (errno.EACCES, PermissionError)]
)
def test_what_the_system_of_a_host_says_names_the_host_and_the_path(tries, way, number, kind):
    tries[1].append(Lane(errno=number, text="no\x1b[2J luck"))
    with pytest.raises(kind) as caught:
        way.ask({"op": "write", "path": "/w/a"})
    assert type(caught.value) is kind
    assert (caught.value.errno, caught.value.strerror) == (number, "pc1: no?[2J luck")
    assert caught.value.filename == "/w/a"
