"""What torch's official builds run on, and which drivers they need."""

import pytest

from gangline.catalog.cuda import driver_floor, has_bf16, has_kernels, needed_cuda, numbers, own_driver


@pytest.mark.parametrize(
    ("cuda", "capability", "expected"),
    [
        ("12.6", "8.9", True),  # a binary for 8.6 runs there
        ("12.6", "12.0", False),
        ("12.8", "12.0", True),
        ("12.8", "12.1", True),
        ("12.8", "10.3", True),
        ("12.8", "6.1", False),
        ("12.6", "6.1", True),
        ("13.0", "7.0", False),
        ("13.0", "7.5", True),
        ("99.1", "8.9", None),
        ("12.8", "", None),
    ],
)
def test_kernels(cuda, capability, expected):
    assert has_kernels(cuda, capability) is expected


@pytest.mark.parametrize(("capability", "expected"), [("12.0", "12.8"), ("8.9", "11.8"), ("77.0", None)])
def test_the_oldest_cuda_for_a_card(capability, expected):
    assert needed_cuda(capability) == expected


def test_drivers():
    assert driver_floor("12.8") == "525.60.13"
    assert own_driver("12.8") == "570.26"
    assert driver_floor("13.0") == own_driver("13.0") == "580.65.6"
    assert driver_floor("99.0") is None
    assert own_driver("12.3") is None
    assert numbers("570.124.06") < numbers("570.133") < numbers("580.65.06")
    assert numbers("unknown") == ()


@pytest.mark.parametrize(("capability", "expected"), [("8.0", True), ("12.0", True), ("7.5", False)])
def test_bf16(capability, expected):
    assert has_bf16(capability) is expected
