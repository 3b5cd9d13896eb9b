"""A model in parts computes what one process computes, and goes on from what any other strategy has saved."""

import pytest

from tests.train import cases_exact, cases_fsdp
from tests.train.test_resume import run, sample_order
from tests.train.tolerances import BF16, FP32, FP64

pytestmark = pytest.mark.rotating

GANGS = {"ddp": [5, 3, 2], "fsdp": [7, 3], "hsdp": [1, 2, 3, 4]}


def test_in_fp32_they_are_off_by_rounding_only(pool):
    ask = {"shares": [5, 3, 2], "strategy": "fsdp", "precision": "fp32", "warmup": 50, "steps": 10}
    result = pool(3).run(cases_exact.losses, **ask)[0]
    for split, alone in zip(result["split"], result["alone"], strict=True):
        assert split[1] == pytest.approx(alone[1], rel=FP32)


def test_in_bf16_layers_travel_as_they_are_computed(pool):
    ask = {"shares": [5, 5], "strategy": "fsdp", "precision": "bf16", "steps": 10}
    result = pool(2).run(cases_exact.losses, **ask)[0]
    for split, alone in zip(result["split"], result["alone"], strict=True):
        assert split[1] == pytest.approx(alone[1], rel=BF16)


@pytest.mark.parametrize(
    ("before", "after", "method"),
    [
        ("ddp", "fsdp", "qlora"),
    ],
)
def test_saved_under_one_strategy_a_run_goes_on_under_another(pool, tmp_path, before, after, method):
    job = {"precision": "fp64", "method": method}
    whole = run(pool, tmp_path / "whole", [10], job=job, steps=12)
    first = run(pool, tmp_path / "cut", GANGS[before], job=job, steps=12, stop_after=5, strategy=before)
    second = run(pool, tmp_path / "cut", GANGS[after], job=job, steps=12, resume_step=5, strategy=after)
    pieces = first[0]["losses"] + second[0]["losses"]
    assert [step for step, _, _ in pieces] == list(range(1, 13))
    for (_, loss, _), (_, expected, _) in zip(pieces, whole[0]["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=FP64)
    assert sample_order(first, second) == sample_order(whole)


@pytest.mark.parametrize(
    ("strategy", "stored", "method"),
    [("hsdp", "float32", "qlora"), ("ddp", "bfloat16", "qlora"), ("fsdp", "bfloat16", "qlora-8")],
)
def test_what_is_read_tensor_by_tensor_has_the_bits_of_what_is_loaded_whole(pool, tmp_path, strategy, stored, method):
    words = {"shares": GANGS[strategy], "strategy": strategy, "method": method, "experts": 0, "stored": stored}
    for result in pool(len(GANGS[strategy])).run(cases_fsdp.read_by_parts, folder=str(tmp_path), **words):
        assert result["differing"] == []
        assert result["divided"] == (0 if strategy == "ddp" else result["frozen"])
        assert result["fused"] == [True, True]


def test_it_does_not_train_every_weight_in_fp16(pool):
    results = pool(2).run(cases_fsdp.refused, precision="fp16", method="full")
    assert all("fsdp with precision: fp16 and method: full" in text for text in results)


@pytest.mark.parametrize(
    ("strategy", "shares", "method", "experts", "along"),
    [
        ("fsdp", [7, 3], "full", 0, [0]),
        ("fsdp", [7, 3], "lora", 0, [0]),
        ("hsdp", [1, 2, 3, 4], "full", 6, [0]),
        ("hsdp", [1, 2, 3, 4], "full", 5, [0, 1]),
        ("fsdp", [5, 3, 2], "lora", 5, [0, 1, 2]),  # of 5 x 48 x 32 and 5 x 32 x 24
    ],
)
def test_every_rank_reads_its_part_of_a_model_that_none_has_held(
    pool, tmp_path, strategy, shares, method, experts, along
):
    """Experts that the ranks do not divide evenly are cut along another of their dimensions."""
    words = {"shares": shares, "strategy": strategy, "method": method, "experts": experts}
    for result in pool(len(shares)).run(cases_fsdp.read_by_parts, folder=str(tmp_path), **words):
        assert result["differing"] == []
        assert result["divided"] == result["frozen"]
        assert result["along"] == along
        assert result["fused"] == [True, True]


def test_a_model_of_the_hub_is_read_by_parts_from_its_cache(pool, tmp_path):
    ask = {"folder": str(tmp_path), "strategy": "fsdp", "method": "lora"}
    assert pool(2).run(cases_fsdp.read_from_the_hub, **ask) == [[], []]


def test_dropout_in_adapters_of_experts_is_refused_by_its_name(zygote):
    said = zygote.fork(cases_fsdp.dropout_in_experts).result()
    assert "method.dropout: adapters of experts take none" in said


@pytest.mark.parametrize(
    ("how", "seen"), [("cut", "SafetensorError"), ("shape", "[96, 32] there, and [90, 32] by config")]
)
def test_files_that_do_not_fit_are_told_of_by_every_rank(pool, tmp_path, how, seen):
    for kind, text in pool(2).run(cases_fsdp.read_damaged, folder=str(tmp_path), how=how):
        assert kind == "ModelError"
        assert "cannot be loaded" in text
        assert seen in text
