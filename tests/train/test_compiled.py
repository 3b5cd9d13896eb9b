"""Compiled layers have the numbers of layers that are not; what was compiled is found again, and gives the same bits."""

import pytest

from tests.train import cases_compiled
from tests.train.tolerances import BF16, FP32, FP32_SUM, HALF_ON_A_GPU, NORM

TAKES_S = 900.0
"""A compiler behind the graphs runs for a minute on two cores that nothing else uses."""
WAYS = [
    ([10], "single", {"method": "full", "precision": "fp32"}),
    ([10], "single", {"method": "lora", "precision": "fp32", "packed": True, "micro_batch": 2}),
    ([10], "single", {"method": "lora", "precision": "bf16", "packed": True, "activation_checkpointing": True}),
    ([10], "single", {"method": "lora", "precision": "fp32", "micro_batch": 2, "kernels": ["auto"]}),
    ([3, 2], "ddp", {"method": "lora", "precision": "fp32", "micro_batch": 2, "activation_checkpointing": True}),
    ([3, 2], "ddp", {"method": "full", "precision": "fp32", "packed": True, "micro_batch": 2}),
    ([3, 2], "local-sgd", {"method": "full", "precision": "fp32"}),
    ([10], "single", {"method": "full", "precision": "fp32", "packed": True, "mixture": True}),
    ([10], "single", {"method": "qlora", "precision": "fp32", "micro_batch": 2, "activation_checkpointing": True}),
    ([1, 1], "fsdp", {"method": "full", "precision": "fp32", "micro_batch": 2}),
    ([1, 1], "fsdp", {"method": "lora", "precision": "fp32", "packed": True, "activation_checkpointing": True}),
]


@pytest.mark.parametrize(("shares", "strategy", "words"), WAYS)
def test_compiled_layers_have_the_losses_of_plain_ones_and_nothing_is_compiled_in_a_step(pool, shares, strategy, words):
    words = {"packed": False, **words}
    results = pool(len(shares)).run(cases_compiled.losses, shares=shares, strategy=strategy, timeout_s=300, **words)
    tolerance = FP32 if words["precision"] == "fp32" else BF16
    for result in results:
        assert result["graphs"] > 0
        assert result["later"] == 0
        assert result["kernels"] == (["lora"] if "kernels" in words else [])
        assert result["plain"]["steps"][-1][0] == 6
        check(result, tolerance)
    assert all(each["compiled"] == results[0]["compiled"] for each in results)


@pytest.mark.timeout(TAKES_S)
def test_a_resumed_run_finds_what_was_compiled_and_has_the_same_bits(pool, tmp_path):
    words = {"precision": "fp32", "micro_batch": 2, "folder": str(tmp_path)}
    found = pool(1).run(cases_compiled.resumed, shares=[10], timeout_s=TAKES_S, **words)[0]
    assert [loss for _, loss, _ in found["whole"]] == pytest.approx([loss for _, loss, _ in found["plain"]], rel=FP32)
    assert found["parts"] == found["whole"]
    assert found["cold"]["made"] > 0
    assert found["warm"]["made"] == 0
    assert found["warm"]["found"] > 0
    assert found["warm"]["seconds"] < found["cold"]["seconds"]


def test_a_model_that_drops_is_refused_before_anything_is_changed(pool):
    said = pool(1).run(cases_compiled.refused, shares=[10], dropout=0.1)[0]
    assert said["kind"] == "UsageError"
    assert "dropout in" in said["seen"]
    assert said["untouched"]


def test_a_model_that_cannot_be_compiled_is_told_so(pool):
    said = pool(1).run(cases_compiled.refused, shares=[10], works=False, precision="fp32")[0]
    assert (said["kind"], said["what"]) == ("UsageError", "compile: the layers of this model cannot be compiled here")
    assert "no working C++ compiler" in said["seen"]
    assert "delete compile" in said["fix"]


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("words", [{"method": "lora"}, {"method": "full", "activation_checkpointing": True}])
def test_compiled_layers_on_a_gpu_have_the_losses_of_plain_ones(zygote, words, kernels):
    given = {"shares": [10], "strategy": "single", "packed": True, "precision": "bf16", "micro_batch": 5, **words}
    given["kernels"] = [kernels]
    told = zygote.fork(cases_compiled.losses, device="cuda", backend="inductor", **given).result(timeout_s=300)
    assert told["graphs"] > 0
    check(told, HALF_ON_A_GPU)


def check(told: dict, tolerance: float) -> None:
    plain, compiled = told["plain"], told["compiled"]
    for (_, loss, norm), (_, own_loss, own_norm) in zip(plain["steps"], compiled["steps"], strict=True):
        assert own_loss == pytest.approx(loss, rel=tolerance)
        assert own_norm == pytest.approx(norm, rel=NORM * tolerance)
    for (step, loss), (own_step, own_loss) in zip(plain["evaluations"], compiled["evaluations"], strict=True):
        assert (own_step, own_loss) == (step, pytest.approx(loss, rel=max(tolerance, FP32_SUM)))
