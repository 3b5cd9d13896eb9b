"""Stragglers are named from what ranks report: the right one, for the right cause, soon; nobody while all is well."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from gangline.worker.step_statistics import StepStatistics, Straggler
from tests.unit.worker.scripted import Gang, said

FROM = 40
"""The step at which something happens."""
HEALTHY: dict[str, dict[str, Any]] = {
    "unlike machines": {},
    "little noise": {"noise": 0.005},
    "like machines": {"shares": lambda _: (3, 3, 3), "micro_batch_s": (0.1, 0.1, 0.1)},
    "two machines": {"hosts": ("pc1", "pc2"), "shares": lambda _: (5, 2)},
    "one machine": {"hosts": ("pc1", "pc1", "pc1")},
    "two ranks each": {
        "hosts": ("pc1", "pc1", "pc2", "pc2"),
        "shares": lambda _: (4,) * 4,
        "micro_batch_s": (0.1,) * 4,
    },
    "a rank without work": {"shares": lambda _: (8, 4, 0)},
    "samples of all lengths": {"lengths": lambda _, draw: draw.uniform(0.3, 1.0)},
    "short samples": {
        "lengths": lambda _, draw: draw.uniform(0.3, 1.0),
        "by_token": False,
        "shares": lambda _: (3, 2, 1),
    },
    "samples become longer": {"lengths": lambda step, _: 2.0 if step >= FROM else 1.0},
    "samples become shorter": {"lengths": lambda step, _: 0.5 if step >= FROM else 1.0, "fixed_s": 0.08},
    "all become slower": {"factor": lambda step, _: 1.3 if step >= FROM else 1.0},
    "shares move": {"shares": lambda step: (20, 11, 9) if step < FROM else (13, 15, 12), "fixed_s": 0.05},
    "few micro-batches move": {"shares": lambda step: (4, 4, 2) if step < FROM else (2, 5, 3), "fixed_s": 0.01},
    "a last step of an epoch": {"shares": lambda step: (20, 11, 9) if step % 20 else (3, 2, 1)},
    "single long steps": {"factor": lambda step, rank: 3.0 if (7 * step + 13 * rank) % 29 == 0 else 1.0},
    "a while now and then": {"factor": lambda step, rank: 1.2 if step % 30 < 4 and rank == 1 else 1.0},
    "reading takes long at times": {"reading_s": lambda step, rank: 0.2 if (step + rank) % 17 == 0 else 0.0},
    "the exchange takes long at times": {"exchange_s": lambda step: 2.0 if step % 13 == 0 else 0.1},
    "the exchange gets shorter": {"exchange_s": lambda step: 0.5 if step < FROM else 0.1},
    "a rank has become faster": {"factor": lambda step, rank: 0.7 if step >= FROM and rank == 0 else 1.0},
}


def slow(rank: int, factor: float, *, until: int = 10**9) -> Any:
    return lambda step, each: factor if each == rank and FROM <= step < until else 1.0


def delay(found: list[tuple[int, Straggler]]) -> int:
    """Steps from when it began to when it was told, both counted."""
    return found[0][0] - FROM + 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", HEALTHY)
def test_nobody_is_named_in_a_healthy_run(kind: str, seed: int) -> None:
    noise = {"noise": random.Random(seed).uniform(0.03, 0.05)}
    assert said(Gang(seed=seed, **noise | HEALTHY[kind]).run(200)) == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("factor", [1.15, 1.5, 3.0])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_computes_slowly_is_named_within_twenty_steps(rank: int, factor: float, seed: int) -> None:
    found = Gang(seed=seed, factor=slow(rank, factor)).run(FROM + 40)
    assert said(found) == [f"compute pc{rank + 1}"]
    assert delay(found) <= 20
    ((_, finding),) = found
    assert finding.factor == pytest.approx(factor, rel=0.08)
    assert finding.now_s / finding.before_s == pytest.approx(finding.factor, rel=1e-6)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_waits_for_samples_is_named_within_twenty_steps(rank: int, seed: int) -> None:
    gang = Gang(seed=seed)
    part_s = 0.15 * gang.micro_batch_s[rank]
    gang.reading_s = lambda step, each: part_s if each == rank and step >= FROM else 0.0
    found = gang.run(FROM + 40)
    assert said(found) == [f"data pc{rank + 1}"]
    assert delay(found) <= 20
    assert found[0][1].factor == pytest.approx(1.15, rel=0.03)
    assert found[0][1].now_s == pytest.approx(part_s + 0.0012, rel=0.15)


@pytest.mark.parametrize("seed", range(2))
def test_an_exchange_that_makes_steps_longer_has_the_links_looked_at_within_twenty_steps(seed: int) -> None:
    found = Gang(seed=seed, exchange_s=lambda step: 0.1 + 0.3 * (step >= FROM)).run(FROM + 40)
    assert said(found) == ["network"]
    assert delay(found) <= 20
    assert (found[0][1].before_s, found[0][1].now_s) == pytest.approx((0.1, 0.4), rel=0.1)


def test_links_that_are_as_before_are_looked_at_less_and_less_often() -> None:
    gang = Gang(exchange_s=lambda step: 0.1 + 0.3 * (step >= FROM))
    steps = [step for step, _ in gang.run(FROM + 400, links_are_slow=False)]
    waits = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert len(steps) <= 10
    assert waits[1] > waits[0] > 10


@pytest.mark.parametrize("hosts", [("pc1", "pc2"), ("pc1", "pc1")])
def test_of_two_the_slower_one_is_named(hosts: tuple[str, ...]) -> None:
    gang = Gang(hosts=hosts, shares=lambda _: (5, 2), factor=slow(1, 1.15))
    assert said(gang.run(FROM + 40), hosts) == [f"compute {hosts[1]}"]


def test_a_slow_host_with_several_ranks_is_named_once() -> None:
    hosts = ("pc1", "pc1", "pc2", "pc2")
    gang = Gang(hosts=hosts, shares=lambda _: (4,) * 4, micro_batch_s=(0.1,) * 4)
    gang.factor = lambda step, rank: 1.3 if rank < 2 and FROM <= step < 80 else 1.0
    assert said(gang.run(150), hosts) == ["compute pc1", "over compute pc1"]


def test_it_is_told_when_it_is_over() -> None:
    found = Gang(factor=slow(1, 1.4, until=80), exchange_s=lambda step: 1.0 if 120 <= step < 160 else 0.1).run(220)
    assert said(found) == ["compute pc2", "over compute pc2", "network", "over network"]
    steps = [step for step, _ in found]
    assert 80 < steps[1] < 100
    assert 160 < steps[3] < 180


def test_moving_shares_do_not_hide_who_became_slow() -> None:
    gang = Gang(factor=slow(0, 2.0), shares=lambda step: (20, 11, 9) if step < FROM + 4 else (13, 15, 12), fixed_s=0.05)
    assert said(gang.run(FROM + 60)) == ["compute pc1"]


def test_a_rank_that_hardly_computes_does_not_matter() -> None:
    gang = Gang(shares=lambda _: (20, 20, 1), micro_batch_s=(0.1, 0.1, 0.02), factor=slow(2, 1.5))
    assert said(gang.run(FROM + 60)) == []


def test_a_machine_that_changes_its_mind_all_the_time_is_named_less_often() -> None:
    gang = Gang(factor=lambda step, rank: 1.3 if step > FROM and step // 15 % 2 and rank == 1 else 1.0)
    named = [step for step, finding in gang.run(400) if finding.what == "slow"]
    assert 2 <= len(named) <= 6  # of 12 times that it was slow


def test_a_drift_is_a_slowdown() -> None:
    gang = Gang(factor=lambda step, rank: 1 + 0.2 * min(1.0, max(0, step - FROM) / 200) * (rank == 1))
    assert said(gang.run(300)) == ["compute pc2"]


def test_two_causes_at_once_are_both_told() -> None:
    gang = Gang(factor=slow(0, 1.3))
    gang.reading_s = lambda step, rank: 0.05 if rank == 1 and step >= FROM else 0.0
    assert sorted(said(gang.run(FROM + 30))) == ["compute pc1", "data pc2"]


def test_all_ranks_come_to_the_same_from_the_same_reports() -> None:
    gang, draw = Gang(factor=slow(2, 1.2)), random.Random(5)
    books = [StepStatistics(gang.hosts) for _ in range(3)]
    for number in range(FROM + 30):
        work = gang.step(number, draw)
        found = [each.learn(work) for each in books]
        assert found[0] == found[1] == found[2]
