"""A process that works, and one that sleeps or only looks now and then, are told apart."""

import pytest

from gangline.agent.supervise import work
from gangline.agent.supervise.work import Amount, WorkWatch


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
