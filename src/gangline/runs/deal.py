"""Dealing whole micro-batches to ranks: the arithmetic that controller and ranks must do alike."""

from __future__ import annotations

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


def steps_per_epoch(num_samples: int, batch: int) -> int:
    """Optimizer steps in one pass over the data; the last one may be short."""
    return -(-num_samples // batch)


def total_steps(num_samples: int, batch: int, *, epochs: float | None, steps: int | None) -> int:
    """Optimizer steps of a whole run: `steps` as given, or enough for `epochs`."""
    if steps is not None:
        return steps
    return max(1, math.ceil((epochs or 1.0) * steps_per_epoch(num_samples, batch) - 1e-9))
