"""The rates that cards keep up: by power, generation and memory, and never by name."""

import dataclasses
from statistics import geometric_mean

import pytest

from gangline.catalog.efficiency import GENERATIONS, sustained_rates
from gangline.catalog.gpu_specs import ARCHITECTURES, GPUS, find_gpu


def product_tflops(name, **more):
    return sustained_rates(find_gpu(name), **more).product_flops / 1e12


def test_measured_products_of_cards_come_out_by_generation_and_power():
    measured = [gpu for gpu in GPUS if gpu.measured_tflops and not gpu.laptop and gpu.architecture in GENERATIONS]
    ratios = [sustained_rates(gpu).product_flops / 1e12 / gpu.measured_tflops for gpu in measured]
    offs = [max(ratio, 1 / ratio) for ratio in ratios]
    assert len(offs) > 40
    assert geometric_mean(offs) < 1.1
    assert sum(off < 1.25 for off in offs) > 0.9 * len(offs)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name} {gpu.memory_gb:g}")
def test_every_card_has_rates_in_order(gpu):
    rates = sustained_rates(gpu)
    assert 0.3 * gpu.tflops < rates.product_flops / 1e12 < 1.1 * gpu.tflops
    assert rates.attention_flops <= rates.product_flops
    assert 0 < rates.bytes_per_s < 1e9 * gpu.bandwidth_gb_s
    assert rates.low <= 1 <= rates.high


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name} {gpu.memory_gb:g}")
def test_another_name_changes_no_rate(gpu):
    for name in ("GeForce RTX 1", "A100-SXM4-80GB", "something else"):
        assert sustained_rates(dataclasses.replace(gpu, name=name)) == sustained_rates(gpu)


def test_cards_of_one_chip_are_told_apart_by_their_power():
    assert product_tflops("a5000") / find_gpu("a5000").tflops > product_tflops("a4000") / find_gpu("a4000").tflops
    assert product_tflops("l4") < 0.7 * find_gpu("l4").tflops
    assert product_tflops("h100 pcie") / find_gpu("h100 pcie").tflops < product_tflops("h100") / find_gpu("h100").tflops


@pytest.mark.parametrize(("watts", "share"), [(115, 1.0), (60, 29.9 / 40.1), (35, 22.7 / 40.1), (140, 1.0)])
def test_a_laptop_does_what_its_power_allows(watts, share):
    full = product_tflops("4070 laptop", power_limit_w=115)
    assert product_tflops("4070 laptop", power_limit_w=watts) == pytest.approx(full * share, rel=0.02)


def test_a_laptop_of_unknown_power_may_be_slower_or_faster():
    rates = sustained_rates(find_gpu("4070 laptop"))
    weakest, strongest = (product_tflops("4070 laptop", power_limit_w=watts) for watts in (35, 115))
    assert rates.low * rates.product_flops / 1e12 == pytest.approx(weakest, rel=0.02)
    assert rates.high * rates.product_flops / 1e12 == pytest.approx(strongest)
    assert sustained_rates(find_gpu("4070")).low == 1


def test_flash_attention_2_uses_a_part_of_newer_chips():
    parts = {
        name: sustained_rates(find_gpu(name)).attention_flops / sustained_rates(find_gpu(name)).product_flops
        for name in ("a100", "rtx4090", "h100", "b200")
    }
    assert parts == pytest.approx({"a100": 1, "rtx4090": 1, "h100": 0.5, "b200": 0.25})


def test_every_chip_of_which_a_rate_is_measured_has_a_generation():
    assert set(GENERATIONS) <= set(ARCHITECTURES)
    assert {gpu.architecture for gpu in GPUS if gpu.measured_tflops} <= set(GENERATIONS)
