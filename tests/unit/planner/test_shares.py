"""Shares: every micro-batch is split exactly once, in proportion to speed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from gangline.planner.shares import rank_shares, rank_weights
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import shares_by_time, split_layers, split_whole


@pytest.mark.parametrize(
    ("count", "weights", "expected"),
    [
        (6, (3, 2, 1), (3, 2, 1)),
        (10, (5, 3, 2), (5, 3, 2)),
        (10, (1, 0, 0), (10, 0, 0)),
        (4, (1, 1, 1), (2, 1, 1)),
        (5, (1, 1, 1), (2, 2, 1)),
        (1, (1, 3), (0, 1)),
        (7, (0.1, 0.1, 0.1), (3, 2, 2)),
        (2, (1, 1, 1, 1), (1, 1, 0, 0)),
        (3, (2.5,), (3,)),
    ],
)
def test_shares_follow_weights(count: int, weights: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert split_whole(count, weights) == expected


def test_any_split_deals_every_micro_batch_and_stays_within_one_of_its_quota() -> None:
    dice = random.Random(7)
    for _ in range(300):
        weights = [dice.choice((0.0, dice.random() * 10 ** dice.randint(-6, 6))) for _ in range(dice.randint(1, 9))]
        weights.append(dice.random() + 0.01)
        count = dice.randint(0, 500)
        shares = split_whole(count, weights)
        assert sum(shares) == count
        assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)
        quotas = [count * weight / sum(weights) for weight in weights]
        assert all(abs(share - quota) < 1 + 1e-6 for share, quota in zip(shares, quotas, strict=True))


def test_the_share_of_a_host_is_divided_over_its_slots() -> None:
    hosts = (
        Host(name="a", workdir="/a", python="python", slots=2, share=3.0),
        Host(name="b", workdir="/b", python="python"),
    )
    assert rank_weights(Cluster(name="c", hosts=hosts)) == (1.5, 1.5, 1.0)


def test_the_shares_of_a_cluster_cover_the_step() -> None:
    hosts = tuple(
        Host(name=name, workdir=f"/{name}", python="python", slots=slots, share=share)
        for name, slots, share in (("a", 2, 3.0), ("b", 1, 2.0), ("c", 1, 0.0))
    )
    assert rank_shares(Cluster(name="c", hosts=hosts), 7) == (2, 2, 3, 0)


def _slowest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def _best(seconds: Sequence[float], count: int) -> float:
    """Every way to split `count` micro-batches, tried."""
    ways = (
        (*first, count - sum(first))
        for first in itertools.product(range(count + 1), repeat=len(seconds) - 1)
        if sum(first) <= count
    )
    return min(_slowest(way, seconds) for way in ways)


def test_shares_by_time_are_as_good_as_the_best_of_all_ways() -> None:
    dice = random.Random(11)
    for _ in range(60):
        seconds = [dice.uniform(0.1, 2.0) for _ in range(dice.randint(1, 4))]
        count = dice.randint(1, 14)
        shares = shares_by_time(seconds, count)
        assert sum(shares) == count
        assert _slowest(shares, seconds) == pytest.approx(_best(seconds, count))


@pytest.mark.parametrize(
    ("count", "per_cent"), [(24, 94.3), (32, 97.8), (40, 100.0)]
)  # ceilings of three machines at 1 : 0.55 : 0.45
def test_three_unlike_machines_come_near_the_sum_of_their_speeds(count: int, per_cent: float) -> None:
    speeds = (1.0, 0.55, 0.45)
    seconds = [1 / speed for speed in speeds]
    step_s = _slowest(shares_by_time(seconds, count), seconds)
    assert 100 * count / step_s / sum(speeds) == pytest.approx(per_cent, abs=0.06)


def test_equal_machines_get_equal_shares_and_the_first_ones_what_is_left() -> None:
    assert shares_by_time([0.1] * 4, 11) == (3, 3, 3, 2)
    assert shares_by_time([0.1, 0.1, 0.1, 0.1 + 1e-15], 11) == (3, 3, 3, 2)
    assert shares_by_time([0.3], 7) == (7,)
    assert shares_by_time([0.3, 0.3], 0) == (0, 0)


def test_a_time_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        shares_by_time([1.0, 0.0], 4)


def test_the_stages_of_a_pipeline_hold_every_layer_within_their_memory() -> None:
    assert split_layers([1.0, 2.0, 2.0], 32, most=[32, 32, 32]) == (16, 8, 8)
    assert split_layers([1.0, 2.0, 2.0], 32, most=[12, 32, 32]) == (12, 10, 10)
    assert split_layers([1.0, 1.0], 32, most=[10, 10]) is None
    assert split_layers([1.0] * 4, 3, most=[3] * 4) is None
