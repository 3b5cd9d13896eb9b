"""Dealing whole micro-batches to ranks: the arithmetic that controller and ranks must do alike."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def split_whole(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut `total` indivisible items in proportion to `weights` (largest remainder; ties go to the lower index).

    The parts sum to `total`; a weight of 0 gets 0. Raises ValueError when no weight is positive.
    """
    weight_sum = math.fsum(weights)
    if weight_sum <= 0 or min(weights) < 0:
        raise ValueError(f"weights must not be negative, and one must be positive: {list(weights)}")
    exact = [total * weight / weight_sum for weight in weights]
    parts = [math.floor(value) for value in exact]
    by_remainder = sorted(
        (index for index, weight in enumerate(weights) if weight > 0),
        key=lambda index: (parts[index] - exact[index], index),
    )
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def shares_by_time(seconds: Sequence[float], total: int, *, least: Sequence[int] | None = None) -> tuple[int, ...]:
    """Cut `total` equal pieces of work so that the last rank to finish finishes as early as possible.

    seconds: of one piece, by rank; least: pieces that a rank gets in any case, none if they are more than there are.
    Each further piece goes to the rank that would have done it first, which gives the smallest possible maximum of
    pieces * seconds. Ties go to the faster rank, then to the lower number. Raises ValueError for times that are not
    positive numbers.
    """
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise ValueError(f"seconds of a micro-batch must be positive: {list(seconds)}")
    held = list(least) if least is not None and sum(least) <= total else [0] * len(seconds)
    # what would be done in this time if pieces could be cut: every rank has all of its whole ones in any case
    time_s = (total - sum(held)) / math.fsum(1 / each for each in seconds)
    shares = [max(count, math.floor(time_s / each)) for count, each in zip(held, seconds, strict=True)]
    queue = [((shares[rank] + 1) * each, each, rank) for rank, each in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(total - sum(shares)):
        _, each, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) * each, each, rank))
    return tuple(shares)


def nearby(wish: int) -> tuple[int, int]:
    """The least and the most samples that are about `wish`: from 3/4 to 4/3 of it."""
    return -(-3 * wish // 4), 4 * wish // 3


def whole_counts(wish: int, micro_batch: int) -> range:
    """Numbers of micro-batches whose samples are about `wish`; empty where there are none."""
    low, high = nearby(wish)
    return range(-(-low // micro_batch), high // micro_batch + 1)


def whole_count(wish: int, micro_batch: int) -> int:
    """The number of micro-batches that is nearest to `wish` samples, one at least; of two, the smaller."""
    below, counts = wish // micro_batch, whole_counts(wish, micro_batch)
    nearest = max(1, below + (2 * (wish - below * micro_batch) > micro_batch))
    return min(max(nearest, counts[0]), counts[-1]) if counts else nearest


def steps_per_epoch(num_samples: int, batch: int) -> int:
    """Optimizer steps in one pass over the data; the last one may be short."""
    return -(-num_samples // batch)


def total_steps(num_samples: int, batch: int, *, epochs: float | None, steps: int | None) -> int:
    """Optimizer steps of a whole run: `steps` as given, or enough for `epochs`."""
    if steps is not None:
        return steps
    return max(1, math.ceil((epochs or 1.0) * steps_per_epoch(num_samples, batch) - 1e-9))
