"""Numbers as people read them."""

from __future__ import annotations

import pytest

from gangline.units import format_bytes, format_count


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (999 << 20, "999 MiB"), (1020 << 20, "0.996 GiB")],
)
def test_bytes_have_three_digits_and_no_exponent(num_bytes: int, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize(("count", "expected"), [(999, "999"), (5_030_000, "5.03 M"), (999_900, "1 M")])
def test_counts_too(count: int, expected: str) -> None:
    assert format_count(count) == expected
