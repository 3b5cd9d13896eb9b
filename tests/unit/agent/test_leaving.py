"""Ranks are told first, and killed if they show no progress; then torchrun, then everything."""

import signal

import pytest

from gangline.agent.supervise import part, processes
from gangline.agent.supervise.part import BREAK_S, LEAVE_S, Leaving

LAUNCHER = processes.Process(1 << 30, 1, 0, "S")
GRACE_S = 120.0


class Ranks:
    """Ranks that are only told."""

    def __init__(self):
        self.told = []
        self.ended = {}
        self.progress = 0
        self.ended_stopped = False

    def terminate(self, number):
        if number not in self.told:
            self.told.append(number)

    def end_stopped(self):
        self.ended_stopped = True

    def signs(self, *, logs):
        del logs
        return self.progress


class Positions:
    """What prefork processes were told."""

    def __init__(self):
        self.told = []

    def hold(self):
        self.told.append("hold")

    def release(self):
        self.told.append("release")

    def leave(self):
        self.told.append("leave")


class Lab:
    def __init__(self, monkeypatch, *, pool=True, program="worker"):
        self.now = 0.0
        self.ranks, self.pool, self.launcher = Ranks(), Positions() if pool else None, []
        monkeypatch.setattr(part.processes, "send", lambda process, number: self.launcher.append(number))
        request = {"grace_s": GRACE_S, "program": program}
        self.leaving = Leaving(request, self.ranks, pool=self.pool, clock=lambda: self.now)

    def wait(self, seconds):
        self.now += seconds
        self.leaving.go_on(LAUNCHER)
        return self.leaving.order


@pytest.fixture
def lab(monkeypatch):
    return lambda **how: Lab(monkeypatch, **how)


def test_ranks_that_hang_after_the_gang_is_broken_are_killed_soon_and_the_launcher_is_left_alone(lab):
    lab = lab()
    lab.leaving.take("break")
    assert (lab.wait(0), lab.ranks.told, lab.pool.told) == ("break", [signal.SIGUSR2], ["hold"])
    assert (lab.wait(BREAK_S - 1), lab.ranks.told) == ("break", [signal.SIGUSR2])
    assert (lab.wait(1), lab.ranks.told) == ("break", [signal.SIGUSR2, signal.SIGKILL])
    assert (lab.wait(LEAVE_S - 1), lab.launcher) == ("break", [])
    assert (lab.wait(1), lab.launcher) == ("kill", [])


@pytest.mark.parametrize(("word", "ends"), [("break", True), ("yield", False), ("stop", False)])
def test_only_when_the_gang_is_broken_ranks_that_are_stopped_are_ended_at_once(lab, word, ends):
    lab = lab()
    lab.leaving.take(word)
    lab.wait(0)
    assert lab.ranks.ended_stopped == ends


def test_ranks_that_still_save_are_waited_for(lab):
    lab = lab()
    lab.leaving.take("break")
    for step in range(10):
        lab.ranks.progress = step
        lab.wait(BREAK_S - 1)
    assert lab.ranks.told == [signal.SIGUSR2]
    lab.wait(BREAK_S)
    assert lab.ranks.told == [signal.SIGUSR2, signal.SIGKILL]


def test_ranks_that_yield_have_as_long_as_those_that_stop(lab):
    lab = lab()
    lab.leaving.take("yield")
    lab.wait(0)
    assert (lab.wait(GRACE_S - 1), lab.ranks.told) == ("yield", [signal.SIGTERM])
    assert (lab.wait(1), lab.ranks.told, lab.launcher) == ("yield", [signal.SIGTERM, signal.SIGKILL], [])


def test_torchrun_is_told_to_stop_after_its_ranks(lab):
    lab = lab()
    lab.leaving.take("stop")
    lab.wait(0)
    assert (lab.wait(GRACE_S), lab.ranks.told, lab.launcher) == ("stop", [signal.SIGTERM], [signal.SIGTERM])
    assert lab.wait(LEAVE_S) == "kill"


def test_a_stronger_order_takes_the_place_of_a_weaker_one_and_not_the_other_way_round(lab):
    lab = lab()
    for word, order in (
        ("yield", "yield"),
        ("break", "break"),
        ("yield", "break"),
        ("stop", "stop"),
        ("break", "stop"),
        (None, "stop"),
        ("kill", "kill"),
        ("stop", "kill"),
    ):
        lab.leaving.take(word)
        assert lab.leaving.order == order
    assert lab.pool.told == ["hold", "hold", "release", "release"]


def test_where_one_rank_has_left_a_gang_that_is_to_stop_its_process_leaves_too(lab):
    lab = lab()
    lab.leaving.take("stop")
    lab.wait(0)
    assert lab.pool.told == ["release"]
    lab.ranks.ended = {0: {}}
    lab.wait(0)
    assert lab.pool.told == ["release", "leave"]


@pytest.mark.parametrize(("word", "program", "meant"), [
    ("yield", "worker", "stop"),
    ("break", "worker", "break"),
    ("yield", "command", "stop"),
    ("break", "command", "kill"),
])  # fmt: skip
def test_without_a_warm_pool_nothing_rests_and_a_program_of_the_user_knows_no_signal_of_ours(lab, word, program, meant):
    lab = lab(pool=False, program=program)
    lab.leaving.take(word)
    assert lab.leaving.order == meant
