"""Shares: every micro-batch is dealt exactly once, in proportion to speed."""

from __future__ import annotations

import random

import pytest

from gangline.planning.shares import rank_shares, rank_weights
from gangline.runs.cluster import Cluster, Host
from gangline.runs.deal import split_whole


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
