"""Along which dimension a tensor is divided, and what that adds to it."""

import pytest

from gangline.runs.formulas import padded, shard_dimension


@pytest.mark.parametrize(
    ("shape", "parts", "dimension", "numbers"),
    [
        ((), 3, 0, 1),
        ((7,), 3, 0, 9),
        ((4097, 4096), 2, 0, 4098 * 4096),  # a row more is nothing, and columns are not asked
        ((8, 28672, 4096), 4, 0, 8 * 28672 * 4096),
        ((8, 28672, 4096), 16, 1, 8 * 28672 * 4096),
        ((5, 32, 24), 3, 2, 5 * 32 * 24),
        ((8, 28672, 4096), 12, 0, 12 * 28672 * 4096),  # nothing is divided evenly
        ((8, 28672, 4096), 3, 0, 9 * 28672 * 4096),
    ],
)
def test_experts_are_cut_where_nothing_is_added(shape, parts, dimension, numbers):
    assert shard_dimension(shape, parts) == dimension
    assert padded(shape, parts) == numbers
