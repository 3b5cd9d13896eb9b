"""The contract of every strategy: `.grad` is the sum of scale * loss over all micro-batches, the same on every rank."""

import pytest

from tests.train import cases_loop
from tests.train.tolerances import FP32_GRADIENT, FP64

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        ("single", [6]),
        ("ddp", [6]),
        ("ddp", [4, 2]),
        ("ddp", [3, 0, 3]),
        ("ddp", [0, 0, 6]),
        ("fsdp", [4, 2]),
        ("fsdp", [3, 0, 3]),
        ("hsdp", [2, 1, 3, 0]),
    ],
)
def test_the_gradient_is_the_sum_over_all_micro_batches(pool, strategy, shares, method):
    results = pool(len(shares)).run(cases_loop.contract, shares=shares, method=method, strategy=strategy)
    for result in results:
        assert result["error"] < FP64
        assert result["norm_error"] < FP64
    assert sum(result["loss"] for result in results) > 1


@pytest.mark.parametrize(("strategy", "shares"), [("ddp", [4, 2]), ("fsdp", [3, 0, 3])])
def test_over_4_bits_it_is_the_same(pool, strategy, shares):
    for result in pool(len(shares)).run(cases_loop.contract, shares=shares, method="qlora", strategy=strategy):
        assert result["error"] < FP64


def test_weights_that_differ_in_a_last_bit_are_made_equal_before_the_first_step(pool):
    (own, after), (other, agreed) = pool(2).run(cases_loop.weights_agree)
    assert own != other
    assert after == agreed == own


@pytest.mark.parametrize(("strategy", "shares", "copies"), [("fsdp", [3, 3, 0], 1), ("hsdp", [1, 1, 2, 2], 2)])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_model_really_lies_in_parts(pool, strategy, shares, copies, method):
    results = pool(len(shares)).run(cases_loop.contract, shares=shares, method=method, strategy=strategy)
    for result in results:
        assert result["divided"] == 3  # two layers, and what is around them
    assert sum(result["held"] for result in results) == copies * results[0]["all"]


@pytest.mark.parametrize(("strategy", "shares"), [("ddp", [3, 3]), ("fsdp", [4, 1, 1])])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_mixture_of_experts_has_the_same_gradient(pool, strategy, shares, method):
    words = {"shares": shares, "method": method, "strategy": strategy, "mixture": True}
    for result in pool(len(shares)).run(cases_loop.contract, **words):
        assert result["error"] < FP32_GRADIENT
