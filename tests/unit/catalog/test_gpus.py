"""The catalogue knows cards by the names that NVML reports, and by what people type."""

import pytest

from gangline.catalog.gpu_specs import GPUS, find_gpu, peak_flops, suggest_gpus

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", 65e12),
        # a laptop card is not the desktop card of the same number
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some Card", None),
        # exact names only: a share of a guessed card's peak would be no measurement
        ("4090", None),
    ],
)
def test_the_peak_is_known_by_name_or_not_claimed(name, expected):
    assert peak_flops(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        # as in the recordings and simulated cards of this repository
        "NVIDIA GeForce RTX 5070 Ti",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4070",
        "NVIDIA GeForce RTX 3090",
        "NVIDIA GeForce RTX 3070 Laptop GPU",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A10",
        "NVIDIA GB10",
        "Tesla V100-SXM2-32GB",
        "Tesla T4",
        # others, as published nvidia-smi outputs have them
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A10G",
        "NVIDIA L40S",
        "NVIDIA RTX A6000",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA GH200 480GB",
        "NVIDIA B300 SXM6 AC",
        "Quadro RTX 8000",
        "NVIDIA TITAN RTX",
        "GeForce GTX 1080 Ti",
    ],
)
def test_what_nvml_says_is_found(name):
    assert find_gpu(name).name == name.removeprefix("NVIDIA ")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name} {gpu.memory_gb:g}")
def test_every_card_is_found_by_its_own_name_however_it_is_written(gpu):
    assert find_gpu(f"NVIDIA {gpu.name}").name == gpu.name
    assert find_gpu(gpu.name.lower()).name == gpu.name
    assert find_gpu("NVIDIA-" + gpu.name.replace(" ", "-")).name == gpu.name  # as Kubernetes labels it
    assert find_gpu(gpu.name, total_bytes=gpu.total_bytes) == gpu


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx4090", "GeForce RTX 4090"),
        ("RTX 4090", "GeForce RTX 4090"),
        ("4090", "GeForce RTX 4090"),
        ("4090 24gb", "GeForce RTX 4090"),
        ("5090d", "GeForce RTX 5090 D"),
        ("4070 laptop", "GeForce RTX 4070 Laptop GPU"),
        ("rtx4070laptop", "GeForce RTX 4070 Laptop GPU"),
        ("5070 ti mobile", "GeForce RTX 5070 Ti Laptop GPU"),
        ("4070 ti super", "GeForce RTX 4070 Ti SUPER"),
        ("4070tisuper", "GeForce RTX 4070 Ti SUPER"),
        ("4080s", "GeForce RTX 4080 SUPER"),
        ("a100-80gb", "A100-SXM4-80GB"),
        ("a100", "A100-SXM4-80GB"),
        ("a100 40gb", "A100-SXM4-40GB"),
        ("a100 pcie", "A100 80GB PCIe"),
        ("h100", "H100 80GB HBM3"),
        ("h100-sxm5", "H100 80GB HBM3"),
        ("h100 pcie", "H100 PCIe"),
        ("h200", "H200"),
        ("v100", "Tesla V100-SXM2-16GB"),
        ("v100 32gb", "Tesla V100-SXM2-32GB"),
        ("a6000", "RTX A6000"),
        ("6000 ada", "RTX 6000 Ada Generation"),
        ("rtx 6000", "Quadro RTX 6000"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("rtx pro 6000 max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        ("2070 laptop", "GeForce RTX 2070 with Max-Q Design"),
        ("l4", "L4"),
        ("l40", "L40"),
        ("a10", "A10"),
        ("dgx spark", "GB10"),
    ],
)
def test_what_people_type_is_understood(typed, meant):
    assert find_gpu(typed).name == meant


@pytest.mark.parametrize(
    ("typed", "total_bytes", "gb"),
    [
        ("3080", None, 10),
        ("3080 12gb", None, 12),
        ("GeForce RTX 3080", 12 * GIB, 12),
        ("NVIDIA GeForce RTX 4060 Ti", 16380 * 2**20, 16),
        ("NVIDIA GeForce RTX 4060 Ti", 8188 * 2**20, 8),
        ("5060 ti 16 gb", None, 16),
        # a card that somebody doubled the memory of is still the card
        ("NVIDIA GeForce RTX 4090", 48 * GIB, 24),
    ],
)
def test_two_sizes_under_one_name_are_told_apart_by_memory(typed, total_bytes, gb):
    assert find_gpu(typed, total_bytes=total_bytes).memory_gb == gb


@pytest.mark.parametrize(
    "typed", ["", "rtx", "laptop", "80gb", "nvidia geforce", "radeon 7900 xtx", "mi300x", "4090 ti", "4090 48gb"]
)
def test_what_is_no_card_here_is_not_guessed(typed):
    assert find_gpu(typed) is None


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("4090 ti", "GeForce RTX 4090"),
        ("4070 super laptop", "GeForce RTX 4070 SUPER"),
        ("RTX 5009", "GeForce RTX 5090"),
        ("h1000", "H100 PCIe"),
        ("4090 48gb", "GeForce RTX 4090"),
    ],
)
def test_an_unknown_name_gets_its_neighbours(typed, expected):
    assert find_gpu(typed) is None
    assert expected in suggest_gpus(typed, at_most=8)
    assert len(suggest_gpus(typed)) <= 5


def test_nothing_is_suggested_for_what_looks_like_no_card():
    assert suggest_gpus("carrier pigeon") == []


def test_laptop_gpus_are_not_their_desktop_namesakes():
    laptops = {gpu.name.removesuffix(" Laptop GPU"): gpu for gpu in GPUS if gpu.name.endswith(" Laptop GPU")}
    pairs = [(laptops[gpu.name], gpu) for gpu in GPUS if gpu.name in laptops]
    assert len(pairs) >= 15
    for laptop, desktop in pairs:
        assert laptop.laptop
        assert not desktop.laptop
        assert find_gpu(f"{desktop.name} laptop") == find_gpu(laptop.name)
        assert peak_flops(laptop.name) is None
        assert peak_flops(desktop.name) is not None
        if laptop.name.startswith("GeForce"):
            # the 3060 and 5050 are as large on laptops, and clock as high at their highest TGP; the others are smaller
            assert laptop.tflops < 1.05 * find_gpu(desktop.name).tflops


def test_memory_is_what_nvml_shows_or_two_percent_less_than_sold():
    assert find_gpu("4090").visible_bytes == find_gpu("4090").total_bytes == 24564 * 2**20
    unknown = find_gpu("4080 super")
    assert unknown.visible_bytes is None
    assert unknown.total_bytes == round(0.98 * 16 * GIB)


def test_cards_without_bf16():
    assert {gpu.compute_capability for gpu in GPUS if not gpu.bf16} == {"6.0", "6.1", "7.0", "7.5"}
    assert all(float(gpu.compute_capability) >= 8.0 for gpu in GPUS if gpu.bf16)
