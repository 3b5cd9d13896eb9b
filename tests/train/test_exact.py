"""Promise 1: any split of the batch over ranks gives what one process gives."""

from collections import Counter

import pytest

from tests.train import cases_exact
from tests.train.tolerances import FP32, FP32_GRADIENT, FP32_SUM, FP64

pytestmark = pytest.mark.rotating

SPLITS = [[5, 3, 2], [4, 3, 3], [10, 0, 0]]
GRADIENT = {"fp64": FP64, "fp32": FP32_GRADIENT}


@pytest.mark.parametrize("shares", SPLITS)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_any_split_gives_the_gradient_of_the_whole_batch(pool, shares, method, precision):
    results = pool(3).run(cases_exact.gradient, shares=shares, method=method, precision=precision)
    for result in results:
        assert result["norm"] > 1e-3
        assert result["error"] <= GRADIENT[precision]
        assert result["equal"]


@pytest.mark.parametrize(
    ("method", "shares", "steps"),
    [
        *(("full", [5, 3, 2], 120), ("lora", [5, 3, 2], 30)),
        *((method, shares, 12) for shares in ([4, 3, 3], [10, 0, 0]) for method in ("full", "lora")),
    ],
)
def test_many_steps_have_the_losses_of_one_process_in_fp64(pool, shares, steps, method):
    result = pool(3).run(cases_exact.losses, shares=shares, method=method, steps=steps)[0]
    assert len(result["split"]) == steps
    assert steps < 120 or result["split"][-1][1] < 0.95 * result["split"][0][1]
    assert _worst(result) <= FP64


def test_many_steps_have_the_losses_of_one_process_in_fp32(pool):
    """All splits and methods over 200 steps: benchmarks/exactness.py."""
    ask = {"shares": [5, 3, 2], "precision": "fp32", "warmup": 50, "steps": 60}
    result = pool(3).run(cases_exact.losses, **ask)[0]
    assert _worst(result) <= FP32


@pytest.mark.parametrize("shares", SPLITS)
def test_the_evaluation_loss_is_that_of_one_process(pool, shares):
    for split, alone in pool(3).run(cases_exact.evaluation, shares=shares, precision="fp32"):
        assert split["label_tokens"] == alone["label_tokens"]
        assert split["loss"] == pytest.approx(alone["loss"], rel=FP32_SUM)


@pytest.mark.parametrize("shares", [[5, 3, 2], [10, 0, 0]])
def test_every_sample_is_read_once_per_epoch_and_the_last_step_is_short(pool, shares):
    reads = pool(3).run(cases_exact.audit, shares=shares, num_samples=37, epochs=2)
    steps = Counter(step for rank in reads for step, _ in rank)
    assert steps == {0: 10, 1: 10, 2: 10, 3: 7, 4: 10, 5: 10, 6: 10, 7: 7}
    for epoch in (range(4), range(4, 8)):
        samples = sorted(sample for rank in reads for step, sample in rank if step in epoch)
        assert samples == list(range(37))


def _worst(result) -> float:
    pairs = zip(result["split"], result["alone"], strict=True)
    return max(abs(split[1] - alone[1]) / abs(alone[1]) for split, alone in pairs)
