"""The table of GPUs holds together: its figures agree with each other, with measurements and with their sources."""

import pytest

from gangline.catalog.gpu_specs import ARCHITECTURES, GPUS, ROWS, SOURCES, find_gpu


def named(rows):
    return {"argvalues": rows, "ids": [f"{row.name} {row.memory_gb:g}" for row in rows]}


def test_there_are_enough_cards():
    names = {maker: {gpu.name for gpu in GPUS if gpu.vendor == maker} for maker in ("NVIDIA", "AMD", "Intel", "Apple")}
    assert len(names["NVIDIA"]) >= 170
    assert len(names["AMD"]) >= 25
    assert len(names["Apple"]) >= 12
    assert len(names["Intel"]) >= 8
    assert len({(row.name, row.memory_gb) for row in ROWS}) == len(ROWS)


def test_every_source_is_said_and_used():
    assert {row.source for row in ROWS} | {"names", "nvidia-smi", "matmul"} == set(SOURCES)
    assert all(len(text) > 40 for text in SOURCES.values())


def test_every_architecture_is_known_and_used():
    assert {row.architecture for row in ROWS} == set(ARCHITECTURES)


@pytest.mark.parametrize("row", **named([row for row in ROWS if row.stated_tflops and row.computed_tflops]))
def test_the_stated_rate_agrees_with_sms_and_clock(row):
    assert row.computed_tflops == pytest.approx(row.stated_tflops, rel=0.03)


def test_only_rates_that_the_maker_throttles_or_that_nobody_explained_have_no_evidence():
    assert {row.name for row in ROWS if row.computed_tflops is None} == {
        "H20",
        "L20",
        "B200",
        "GB200",
        "GB300",
        "B300 SXM6 AC",
    }
    assert all(row.stated_tflops or row.computed_tflops for row in ROWS)


@pytest.mark.parametrize("row", **named([row for row in ROWS if row.measured_tflops]))
def test_measured_matmul_is_where_the_rate_lets_it_be(row):
    rate = row.stated_tflops or row.computed_tflops
    # GeForce cards clock above their boost; server cards are held down by power, some very far
    lowest, highest = (0.75, 1.25) if row.name.startswith("GeForce") else (0.55, 1.15)
    assert lowest <= row.measured_tflops / rate <= highest


def test_a_gtx_16_is_slower_than_any_rtx_20():
    gtx = [row for row in ROWS if row.architecture == "turing-gtx"]
    rtx = [row for row in ROWS if row.architecture == "turing" and "Max-Q" not in row.name]
    assert max(row.computed_tflops for row in gtx) < min(row.computed_tflops for row in rtx)


@pytest.mark.parametrize("row", **named([row for row in ROWS if row.visible_mib]))
def test_visible_memory_is_near_what_was_sold(row):
    # 0.937: ECC on GDDR takes a sixteenth; 1.02: 180 GB are 183359 MiB of decimal gigabytes
    assert 0.93 <= row.visible_mib / 1024 / row.memory_gb <= 1.02


# Section 4 of the facts this catalogue was built from: TFLOPS, GB, GB/s.
SURVEY = {
    "GeForce RTX 2060": (26, 6, 336),
    "GeForce RTX 2070 SUPER": (36, 8, 448),
    "GeForce RTX 2080 Ti": (54, 11, 616),
    "GeForce RTX 3050": (18, 8, 224),
    "GeForce RTX 3060": (25.5, 12, 360),
    "GeForce RTX 3060 Ti": (32, 8, 448),
    "GeForce RTX 3070": (40.6, 8, 448),
    "GeForce RTX 3070 Ti": (43.5, 8, 608),
    "GeForce RTX 3070 Ti Laptop GPU": (35, 8, 448),
    "GeForce RTX 3080": (59.5, 10, 760),
    "GeForce RTX 3080 Ti": (68, 12, 912),
    "GeForce RTX 3090": (71, 24, 936),
    "GeForce RTX 3090 Ti": (80, 24, 1008),
    "GeForce RTX 4060": (30, 8, 272),
    "GeForce RTX 4060 Ti": (44, 8, 288),
    "GeForce RTX 4070": (58.3, 12, 504),
    "GeForce RTX 4070 SUPER": (71, 12, 504),
    "GeForce RTX 4070 Ti": (80, 12, 504),
    "GeForce RTX 4070 Ti SUPER": (88, 16, 672),
    "GeForce RTX 4080": (97.5, 16, 717),
    "GeForce RTX 4080 SUPER": (104, 16, 736),
    "GeForce RTX 4090": (165, 24, 1008),
    "GeForce RTX 4060 Laptop GPU": (29, 8, 256),
    "GeForce RTX 4070 Laptop GPU": (40.1, 8, 256),
    "GeForce RTX 4080 Laptop GPU": (68, 12, 432),
    "GeForce RTX 4090 Laptop GPU": (79, 16, 576),
    "GeForce RTX 5060": (38, 8, 448),
    "GeForce RTX 5060 Ti": (47, 8, 448),
    "GeForce RTX 5070": (61.7, 12, 672),
    "GeForce RTX 5070 Ti": (87.9, 16, 896),
    "GeForce RTX 5080": (112.6, 16, 960),
    "GeForce RTX 5090": (209.5, 32, 1792),
    "GB10": (125, 128, 273),
    "Tesla T4": (65, 16, 320),
    "Tesla V100-SXM2-16GB": (125, 16, 900),
    "Tesla V100-SXM2-32GB": (125, 32, 900),
    "A10": (125, 24, 600),
    "A10G": (70, 24, 600),
    "A30": (165, 24, 933),
    "A40": (150, 48, 696),
    "RTX A5000": (111, 24, 768),
    "RTX A6000": (155, 48, 768),
    "A100-SXM4-40GB": (312, 40, 1555),
    "A100-SXM4-80GB": (312, 80, 2039),
    "L4": (121, 24, 300),
    "L40": (181, 48, 864),
    "L40S": (362, 48, 864),
    "RTX 6000 Ada Generation": (364, 48, 960),
    "RTX PRO 6000 Blackwell Workstation Edition": (504, 96, 1792),
    "H100 PCIe": (756, 80, 2000),
    "H100 80GB HBM3": (989, 80, 3350),
    "H20": (148, 96, 4000),
    "H200": (989, 141, 4800),
    "B200": (2250, 180, 8000),
    "B300 SXM6 AC": (2250, 288, 8000),
    "GB200": (2500, 186, 8000),
}
# "about" there, or a range: TFLOPS from, to, GB, GB/s.
SURVEY_ROUGHLY = {
    "GeForce RTX 5070 Laptop GPU": (39, 44, 8, 384),
    "GeForce RTX 5070 Ti Laptop GPU": (34, 52.5, 12, 672),
    "GeForce RTX 5080 Laptop GPU": (66, 72, 16, 896),
    "GeForce RTX 5090 Laptop GPU": (86, 94, 24, 896),
}


@pytest.mark.parametrize(("name", "expected"), SURVEY.items())
def test_the_survey_is_matched(name, expected):
    gpu = find_gpu(name)
    assert (gpu.tflops, gpu.memory_gb, gpu.bandwidth_gb_s) == expected


@pytest.mark.parametrize(("name", "expected"), SURVEY_ROUGHLY.items())
def test_the_rough_figures_of_the_survey_are_matched(name, expected):
    gpu = find_gpu(name)
    lowest, highest, *rest = expected
    assert lowest <= gpu.tflops <= highest
    assert [gpu.memory_gb, gpu.bandwidth_gb_s] == rest
