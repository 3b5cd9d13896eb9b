"""The catalogue knows cards by the names that NVML reports, and by what people type."""

import pytest

from gangline.catalog.gpu_specs import GPUS, accelerator, find_gpu, meanings, peak_flops, suggest_gpus

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
    assert find_gpu(f"{gpu.vendor} {gpu.name}").name == gpu.name
    assert find_gpu(gpu.name.lower()).name == gpu.name
    assert find_gpu(f"{gpu.vendor}-" + gpu.name.replace(" ", "-")).name == gpu.name  # as Kubernetes labels it
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
        ("quadro rtx 6000", "Quadro RTX 6000"),
        ("rtx 6000 48gb", "RTX 6000 Ada Generation"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("rtx pro 6000 max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        ("2070 laptop", "GeForce RTX 2070 with Max-Q Design"),
        ("l4", "L4"),
        ("l40", "L40"),
        ("a10", "A10"),
        ("dgx spark", "GB10"),
        ("ascent gx10", "GB10"),
        ("DGX H100", "H100 80GB HBM3"),
        ("4070 tis", "GeForce RTX 4070 Ti SUPER"),
        ("A6000 Ada", "RTX 6000 Ada Generation"),
        ("RTX 6000 Blackwell", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("b200 192gb", "B200"),
        ("jetson nano", "Jetson Nano 4GB"),
        ("gtx 980", "GeForce GTX 980"),
        ("mi325", "Instinct MI325X"),
        ("iMac M3", "Apple M3"),
        ("titan xp", "TITAN Xp"),
        ("titanv", "TITAN V"),
        ("Titan RTX", "TITAN RTX"),
        ("p40", "Tesla P40"),
        ("k80", "Tesla K80"),
        ("4090d 48gb", "GeForce RTX 4090 D"),
        ("rtx pro 5000 laptop", "RTX PRO 5000 Blackwell Generation Laptop GPU"),
        ("jetson orin nano", "Jetson Orin Nano 8GB"),
        ("Jetson AGX Orin", "Jetson AGX Orin 64GB"),
        ("jetson thor", "Jetson AGX Thor"),
        # other makers
        ("Radeon RX 7900 XTX", "Radeon RX 7900 XTX"),
        ("7900xtx", "Radeon RX 7900 XTX"),
        ("rx7900xt", "Radeon RX 7900 XT"),
        ("RX-9070-XT", "Radeon RX 9070 XT"),
        ("rx 6600", "Radeon RX 6600"),
        ("w7900", "Radeon PRO W7900"),
        ("r9700", "Radeon AI PRO R9700"),
        ("strix halo", "Radeon 8060S"),
        ("Ryzen AI Max+ 395", "Radeon 8060S"),
        ("mi 300x", "Instinct MI300X"),
        ("AMD Instinct MI250X", "Instinct MI250X"),
        ("a770", "Arc A770"),
        ("intel arc b580", "Arc B580"),
        ("arc pro b60", "Arc Pro B60"),
        ("max 1550", "Data Center GPU Max 1550"),
        ("m1", "Apple M1"),
        ("M2 Ultra", "Apple M2 Ultra"),
        ("m3max", "Apple M3 Max"),
        ("macbook pro m4 pro", "Apple M4 Pro"),
        ("Mac Studio M3 Ultra", "Apple M3 Ultra"),
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
        # cards that somebody exchanged the memory of
        ("NVIDIA GeForce RTX 4090", 48 * GIB, 48),
        ("4090 48gb", None, 48),
        ("4090", None, 24),
        ("2080ti 22gb", None, 22),
        ("NVIDIA GeForce RTX 2080 Ti", 22528 * 2**20, 22),
        ("m3max 128gb", None, 128),
        ("m3 max 36 gb", None, 36),
        ("m3max", None, 48),
        ("mi50 32gb", None, 32),
        ("m4 max 128", None, 128),
        # Jetson's modules have one name for NVML
        ("Orin (nvgpu)", 30 * GIB, 32),
        ("Orin (nvgpu)", 61 * GIB, 64),
        ("Orin (nvgpu)", 15 * GIB, 16),
        ("H100", 94 * GIB, 94),
    ],
)
def test_two_sizes_under_one_name_are_told_apart_by_memory(typed, total_bytes, gb):
    assert find_gpu(typed, total_bytes=total_bytes).memory_gb == gb


@pytest.mark.parametrize(
    "typed",
    ["", "rtx", "laptop", "80gb", "nvidia geforce", "radeon", "rtx 7900 xtx", "radeon 4090", "4090 ti", "4090 96gb"],
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
        ("4090 96gb", "GeForce RTX 4090"),
        ("7900 xtz", "Radeon RX 7900 XTX"),
        ("m4 max ultra", "Apple M4 Max"),
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
    ours = [gpu for gpu in GPUS if gpu.vendor == "NVIDIA"]
    old = {"3.5", "3.7", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5"}
    assert {gpu.compute_capability for gpu in ours if not gpu.bf16} == old
    assert all(float(gpu.compute_capability) >= 8.0 for gpu in ours if gpu.bf16)
    others = {gpu.architecture for gpu in GPUS if gpu.vendor != "NVIDIA" and not gpu.bf16}
    assert others == {"gcn", "vega20", "rdna2", "cdna", "apple-m1"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx6000", {"Quadro RTX 6000", "RTX 6000 Ada Generation", "RTX PRO 6000 Blackwell Workstation Edition"}),
        ("RTX 4000", {"Quadro RTX 4000", "RTX 4000 Ada Generation", "RTX PRO 4000 Blackwell"}),
        ("5000", {"Quadro RTX 5000", "RTX 5000 Ada Generation", "RTX PRO 5000 Blackwell"}),
        ("titan x", {"GeForce GTX TITAN X", "TITAN X (Pascal)"}),
        ("rx 7900", {"Radeon RX 7900 XTX", "Radeon RX 7900 XT", "Radeon RX 7900 GRE"}),
        ("rtx-4500", {"RTX 4500 Ada Generation", "RTX PRO 4500 Blackwell"}),
    ],
)
def test_a_name_of_several_cards_is_not_guessed_and_each_can_be_typed(typed, meant):
    assert find_gpu(typed) is None
    assert {find_gpu(words).name for words in meanings(typed)} == meant


@pytest.mark.parametrize("typed", ["4090", "quadro rtx 6000", "rtx pro 6000", "6000 ada", "rtx 6000 48gb", "a6000"])
def test_a_name_of_one_card_has_one_meaning(typed):
    assert meanings(typed) == ()


@pytest.mark.parametrize(
    ("typed", "whose"),
    [
        ("tpu v5e", "Google's TPU"),
        ("TPUv4", "Google's TPU"),
        ("gaudi3", "Intel's Gaudi"),
        ("Ascend 910B", "Huawei's Ascend"),
        ("910c", "Huawei's Ascend"),
        ("inferentia2", "AWS Inferentia"),
        ("trn2", "AWS Trainium"),
    ],
)
def test_accelerators_that_are_no_gpus_are_known_by_name(typed, whose):
    assert accelerator(typed) == whose
    assert find_gpu(typed) is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name} {gpu.memory_gb:g}")
def test_no_gpu_is_taken_for_another_accelerator(gpu):
    assert accelerator(gpu.name) is None


@pytest.mark.parametrize(
    ("typed", "lowest_gib", "highest_gib"),
    [
        # the system of a GB10 at rest held 6.4 of 119.7 GiB
        ("gb10", 112, 114),
        # recommendedMaxWorkingSetSize in logs of llama.cpp, in MiB: 10922, 21845, 73728
        ("m1 16gb", 10, 10.7),
        ("m2 max 32gb", 21, 21.4),
        ("m2 max 96gb", 71, 72),
        ("jetson orin nano 8gb", 5, 6.5),
        ("strix halo", 90, 96),
    ],
)
def test_of_a_computers_memory_the_gpu_gets_what_its_system_leaves(typed, lowest_gib, highest_gib):
    gpu = find_gpu(typed)
    assert gpu.is_unified
    assert lowest_gib <= gpu.usable_bytes / GIB <= highest_gib
    assert gpu.usable_bytes < gpu.memory_gb * GIB


def test_a_cards_own_memory_is_all_for_programs():
    assert not find_gpu("4090").is_unified
    assert find_gpu("4090").usable_bytes == find_gpu("4090").total_bytes


def test_the_trainer_says_which_cards_it_cannot_use():
    assert find_gpu("3090").untrained == ""
    assert "AMD" in find_gpu("7900xtx").untrained
    assert "Apple" in find_gpu("m2 ultra").untrained
    assert "3.7" in find_gpu("k80").untrained
    assert find_gpu("p40").untrained == ""
