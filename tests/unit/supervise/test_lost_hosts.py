"""Hosts that were lost, and are looked for."""

import threading

from gangline.supervise.lost_hosts import LostHosts
from tests.waiting import wait_until


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make(answers):
    clock = Clock()
    lost = LostHosts(answers.__getitem__, clock=clock)
    lost.lose(["pc3"])
    return lost, clock


def look_until(lost, clock, seconds):
    for _ in range(seconds):
        lost.look()
        clock.now += 1


def test_a_host_that_stays_silent_is_not_back():
    lost, clock = make({"pc3": False})
    look_until(lost, clock, 60)
    assert (lost.back(), lost.silent) == ([], {"pc3"})


def test_a_host_that_answers_for_a_while_is_back():
    lost, clock = make({"pc3": True})
    lost.look()
    clock.now += 9.9
    assert lost.back() == []
    clock.now += 0.2
    assert (lost.back(), lost.silent) == (["pc3"], set())


def test_one_that_comes_and_goes_is_not():
    answers = {"pc3": True}
    lost, clock = make(answers)
    for answers["pc3"] in (True, False) * 10:
        look_until(lost, clock, 4)
    assert lost.back() == []


def test_a_look_that_takes_long_keeps_nobody_waiting():
    let_go, asked = threading.Event(), threading.Event()

    def answers(_host):
        asked.set()
        return let_go.wait(20)

    clock = Clock()
    lost = LostHosts(answers, clock=clock)
    lost.lose(["pc3"])
    lost.look()
    assert asked.is_set()
    assert lost.silent == {"pc3"}
    let_go.set()
    wait_until(lambda: (lost.look(), lost._since["pc3"])[1] is not None, "the answer is taken in")


def test_hosts_that_have_joined_again_are_forgotten():
    lost, clock = make({"pc3": True})
    look_until(lost, clock, 20)
    lost.lose([])
    assert (lost.back(), lost.silent) == ([], set())
