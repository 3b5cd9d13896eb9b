"""Before anything is measured: an interval that published measurements fall into."""

import itertools

import pytest

from gangline.catalog.efficiency import FLOOR_S_PER_LAYER, default_efficiency
from gangline.catalog.gpu_specs import GPUS, find_gpu

METHODS = ["full", "lora", "qlora"]
SIZES = [0.5e9, 1.5e9, 2.4e9, 3e9, 7e9, 70e9]


@pytest.mark.parametrize(
    ("gpu", "method", "num_parameters", "tuned", "measured"),
    [
        # eager Hugging Face code, share of the peak that executed FLOP reached
        ("4080", "qlora", 7e9, False, 0.40),
        ("4080", "qlora", 3e9, False, 0.25),
        ("4080", "qlora", 1.5e9, False, 0.23),
        ("4060", "qlora", 1.5e9, False, 0.19),
        ("a100", "lora", 7e9, False, 0.44),
        ("a100", "qlora", 14e9, False, 0.54),
        # tuned: torchtune; FSDP pre-training
        ("4090", "qlora", 8e9, True, 0.66),
        ("a100", "full", 7e9, True, 0.55),
        ("a100", "full", 30e9, True, 0.64),
        ("h100", "full", 30e9, True, 0.36),
        ("h100", "full", 7e9, True, 0.46),
    ],
)
def test_published_measurements_are_inside(gpu, method, num_parameters, tuned, measured):
    low, _, high = default_efficiency(find_gpu(gpu), method=method, num_parameters=num_parameters, tuned=tuned)
    assert low <= measured <= high


@pytest.mark.parametrize(
    ("gpu", "method", "num_parameters", "tuned", "likely"),
    [
        ("4090", "lora", 7e9, False, 0.35),
        ("4090", "qlora", 7e9, False, 0.30),
        ("4090", "lora", 1.5e9, False, 0.20),
        ("4090", "qlora", 1.5e9, False, 0.20),
        ("4090", "qlora", 7e9, True, 0.55),
        ("a100", "lora", 7e9, False, 0.45),
        ("2080 ti", "lora", 7e9, False, 0.35 * 0.8),
    ],
)
def test_the_likely_figure(gpu, method, num_parameters, tuned, likely):
    figures = default_efficiency(find_gpu(gpu), method=method, num_parameters=num_parameters, tuned=tuned)
    assert figures == pytest.approx((likely * 0.65, likely, likely * 1.35), rel=0.002)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name} {gpu.memory_gb:g}")
def test_for_every_card_the_interval_is_ordered_and_bigger_models_do_no_worse(gpu):
    for method, tuned in itertools.product(METHODS, [False, True]):
        intervals = [default_efficiency(gpu, method=method, num_parameters=size, tuned=tuned) for size in SIZES]
        assert all(0.02 < low < likely < high <= 1 for low, likely, high in intervals)
        assert intervals == sorted(intervals)


def test_tuned_code_is_never_expected_to_be_slower():
    for gpu, method, size in itertools.product(GPUS, METHODS, SIZES):
        eager = default_efficiency(gpu, method=method, num_parameters=size)
        tuned = default_efficiency(gpu, method=method, num_parameters=size, tuned=True)
        assert tuned > eager


@pytest.mark.parametrize(("watts", "share"), [(115, 1.0), (60, 29.9 / 40.1), (35, 22.7 / 40.1), (140, 1.0)])
def test_a_laptop_does_what_its_power_allows(watts, share):
    gpu = find_gpu("4070 laptop")
    _, likely, _ = default_efficiency(gpu, method="lora", num_parameters=7e9, power_limit_w=watts)
    assert likely == pytest.approx(0.35 * 0.9 * share, rel=0.02)


def test_a_laptop_of_unknown_power_has_the_wider_interval():
    gpu = find_gpu("4070 laptop")
    low, likely, high = default_efficiency(gpu, method="lora", num_parameters=7e9)
    assert high / low > 1.35 / 0.65
    weakest = default_efficiency(gpu, method="lora", num_parameters=7e9, power_limit_w=35)
    strongest = default_efficiency(gpu, method="lora", num_parameters=7e9, power_limit_w=115)
    assert low == pytest.approx(weakest[0], rel=0.02)
    assert weakest[1] < likely < strongest[1]
    assert high == pytest.approx(strongest[2])


def test_a_card_with_more_flop_than_memory_can_feed_reaches_less_of_it():
    def likely(name):
        return default_efficiency(find_gpu(name), method="lora", num_parameters=7e9)[1]

    assert likely("l40s") < likely("rtx 6000 ada") < likely("a6000") <= likely("a100")
    assert likely("h100 pcie") < likely("h100") < likely("h200")


def test_the_floor_of_qlora_is_the_highest():
    assert FLOOR_S_PER_LAYER["qlora"] * 28 == pytest.approx(0.34, rel=0.02)  # Qwen2.5-1.5B on an RTX 4080
    assert FLOOR_S_PER_LAYER["lora"] < FLOOR_S_PER_LAYER["qlora"]
    assert set(FLOOR_S_PER_LAYER) == set(METHODS)
