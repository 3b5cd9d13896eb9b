"""The catalogue knows cards by the names that NVML reports."""

import pytest

from gangline.catalog.gpus import peak_flops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", 65e12),
        # a laptop card is not the desktop card of the same number
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some Card", None),
    ],
)
def test_the_peak_is_known_by_name_or_not_claimed(name, expected):
    assert peak_flops(name) == expected
