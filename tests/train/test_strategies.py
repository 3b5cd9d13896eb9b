"""The contract of every strategy: `.grad` is the sum of scale * loss over all micro-batches, the same on every rank."""

import pytest

CASES = "tests.train.cases_loop"


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("strategy", "shares"), [("single", [6]), ("ddp", [6]), ("ddp", [4, 2]), ("ddp", [3, 0, 3]), ("ddp", [0, 0, 6])]
)
def test_the_gradient_is_the_sum_over_all_micro_batches(pool, strategy, shares, method):
    results = pool(len(shares)).run(f"{CASES}:contract", shares=shares, method=method, strategy=strategy)
    for result in results:
        assert result["error"] < 1e-9
    assert sum(result["loss"] for result in results) > 1


def test_weights_that_differ_in_a_last_bit_are_made_equal_before_the_first_step(pool):
    (own, after), (other, agreed) = pool(2).run(f"{CASES}:weights_agree")
    assert own != other
    assert after == agreed == own
