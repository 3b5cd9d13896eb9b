"""A process that works, and one that sleeps or only looks now and then, are told apart."""

import pytest

from gangline.agent.supervise import work
from gangline.agent.supervise.work import Amount, StarvedTime, WorkWatch


class Group:
    """Processes that do what they are told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.done = {7: Amount()}
        monkeypatch.setattr(work, "amount_of", self.done.get)
        self.work = WorkWatch(clock=lambda: self.now)

    def idle_after(self, seconds, pid=7, **more):
        """A second passes between two looks; work is spread over them."""
        for _ in range(seconds):
            self.now += 1
            self.done[pid] = self.done.get(pid, Amount()).plus(Amount(**more))
            self.work.look(self.done)
        return self.work.idle_s


@pytest.fixture
def group(monkeypatch):
    return Group(monkeypatch)


@pytest.mark.parametrize("more", [
    {"cpu_s": 0.05}, {"minor_faults": 100}, {"major_faults": 3}, {"read_bytes": 200 << 10}, {"stored_bytes": 40 << 10},
    {"cpu_s": 0.003, "wanted_s": 0.99},
])  # fmt: skip
def test_any_kind_of_work_counts_although_it_is_slow(group, more):
    assert group.idle_after(60, **more) < 10


def test_one_that_sleeps_is_idle_from_its_last_work_on(group):
    group.idle_after(5, cpu_s=1.0)
    assert group.idle_after(40) == 40


def test_one_that_only_looks_now_and_then_is_idle(group):
    assert group.idle_after(40, cpu_s=0.01, minor_faults=5, read_bytes=2000, wanted_s=0.33) == 40


def test_one_that_has_just_begun_works(group):
    group.idle_after(40)
    assert group.idle_after(1, pid=8, cpu_s=0.3) == 0


def test_one_that_has_ended_takes_nothing_away(group):
    group.idle_after(3, pid=8, cpu_s=5.0)
    del group.done[8]
    assert group.idle_after(30) == 30
    assert group.work.row() == {"idle_s": 30, "cpu_s": 15.0, "read_bytes": 0}


class Rank:
    """A process of two threads that waits for what it is told to."""

    def __init__(self, monkeypatch):
        self.now, self.delays, self.faults = 100.0, {"7": 0, "8": 0}, 0
        self.ready = set()
        monkeypatch.setattr(work, "_run_delays", lambda _pid: {name: (0, each) for name, each in self.delays.items()})
        monkeypatch.setattr(work, "_is_ready", lambda _pid, name: name in self.ready)
        monkeypatch.setattr(work, "_major_faults", lambda _pid: self.faults)
        self.starved = StarvedTime(clock=lambda: self.now)
        self.starved.look(7)

    def after(self, seconds, *, every=1.0, faults=0, **delays):
        """So many looks, between which threads waited for a processor for so long."""
        for _ in range(seconds):
            self.now += every
            self.faults += faults
            for name, waited_s in delays.items():
                self.delays[name.strip("t")] += int(waited_s * 1e9)
            self.starved.look(7)
        return round(self.starved.seconds, 3)


def test_the_thread_that_waits_longest_for_a_processor_counts(monkeypatch):
    assert Rank(monkeypatch).after(10, t7=0.1, t8=0.7) == 7.0


def test_one_that_is_ready_all_the_time_and_never_runs_is_starved_before_the_kernel_says_so(monkeypatch):
    rank = Rank(monkeypatch)
    rank.ready.add("8")
    assert rank.after(4) == 4.0
    rank.ready.clear()
    assert rank.after(4) == 4.0, "one that sleeps is not"


def test_one_that_swaps_could_not_go_on_and_a_page_now_and_then_is_nothing(monkeypatch):
    assert Rank(monkeypatch).after(10, faults=5) == 10.0
    assert Rank(monkeypatch).after(10, faults=1) == 0.0


def test_no_second_counts_twice_and_a_gap_between_looks_not_at_all(monkeypatch):
    assert Rank(monkeypatch).after(10, t7=3.0, faults=9) == 10.0
    assert Rank(monkeypatch).after(3, every=6.0, t7=6.0) == 0.0


def test_a_thread_that_is_new_brings_nothing_with_it(monkeypatch):
    rank = Rank(monkeypatch)
    rank.delays["9"] = 10**12
    assert rank.after(1) == 0.0
    assert rank.after(1, t9=0.5) == 0.5
