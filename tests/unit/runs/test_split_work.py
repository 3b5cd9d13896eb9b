"""Splitting whole micro-batches by time: as good as the best of all ways."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from gangline.runs.gang import shares_by_time, whole_count, whole_counts


def _slowest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def _best(seconds: Sequence[float], total: int, least: Sequence[int]) -> float:
    """Every way to split `total` pieces that gives all ranks what they get in any case, tried."""
    ways = itertools.product(*(range(count, total + 1) for count in least))
    return min(_slowest(way, seconds) for way in ways if sum(way) == total)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_way_ends_earlier(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(40):
        num_ranks = dice.randint(1, 4)
        # small whole numbers of seconds make ties
        whole = dice.random() < 0.5
        seconds = [float(dice.randint(1, 3)) if whole else dice.uniform(0.01, 2.0) for _ in range(num_ranks)]
        least = [dice.randint(0, 2) for _ in range(num_ranks)]
        total = sum(least) + dice.randint(0, 6)
        shares = shares_by_time(seconds, total, least=least)
        assert sum(shares) == total
        assert all(share >= count for share, count in zip(shares, least, strict=True))
        assert _slowest(shares, seconds) == pytest.approx(_best(seconds, total, least), rel=1e-12)


def test_ties_go_to_the_faster_rank_and_then_to_the_lower_number() -> None:
    assert shares_by_time([1.0, 1.0, 1.0], 4) == (2, 1, 1)
    assert shares_by_time([2.0, 1.0], 2) == (0, 2)


def test_what_ranks_get_in_any_case_counts_as_done() -> None:
    assert shares_by_time([1.0, 100.0], 10, least=[1, 1]) == (9, 1)
    assert shares_by_time([1.0, 100.0], 1, least=[1, 1]) == (1, 0)


def test_many_pieces_are_dealt_as_few_are() -> None:
    """The start in one go, with the whole pieces of every rank, gives what splitting one by one gives."""
    dice = random.Random(5)
    for _ in range(50):
        seconds = [dice.choice((0.5, 1.0, dice.uniform(0.1, 3.0))) for _ in range(dice.randint(1, 9))]
        least = [dice.randint(0, 40) for _ in seconds]
        total = sum(least) + dice.randint(0, 300)
        shares = list(least)
        for _ in range(total - sum(least)):
            ends = [((share + 1) * each, each, rank) for rank, (share, each) in enumerate(zip(shares, seconds))]  # noqa: B905
            shares[min(ends)[2]] += 1
        assert shares_by_time(seconds, total, least=least) == tuple(shares)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        shares_by_time([1.0, bad], 4)


def test_about_means_three_quarters_to_four_thirds() -> None:
    assert whole_counts(32, 1) == range(24, 43)
    assert whole_counts(32, 16) == range(2, 3)
    assert not whole_counts(2, 4)
    assert whole_count(30, 4) == 7  # 28 and 32 are as near: the smaller
    assert whole_count(3, 2) == 2  # 2 samples are less than three quarters of 3
