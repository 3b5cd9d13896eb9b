"""DeepSpeed's ZeRO computes what one process computes, and goes on from what any other strategy has saved."""

import pytest


@pytest.mark.parametrize(
    ("strategy", "method", "shares"),
    [("zero-1", "full", [5, 3, 2]), ("zero-2", "lora", [7, 3]), ("zero-3", "full", [5, 3, 2])],
)
def test_many_steps_have_the_losses_of_one_process(pool, strategy, method, shares):
    ask = {"shares": shares, "strategy": strategy, "method": method, "precision": "fp32", "warmup": 50, "steps": 16}
    result = pool(len(shares)).run("tests.train.cases_exact:losses", **ask, packed=strategy == "zero-2")[0]
    assert len(result["split"]) == 16
    for (_, split, norm), (_, alone, norm_alone) in zip(result["split"], result["alone"], strict=True):
        assert split == pytest.approx(alone, rel=1e-4)
        assert norm == pytest.approx(norm_alone, rel=1e-4)
