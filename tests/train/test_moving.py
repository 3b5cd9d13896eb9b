"""Shares that move while a run goes on change neither samples nor order nor numbers."""

from collections import defaultdict

import pytest

from tests.train import cases_moving
from tests.train.tolerances import FP32, FP64

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize(
    ("method", "precision", "warmup", "pieces", "tolerance", "steps"),
    [("full", "fp64", 5, True, FP64, 60), ("lora", "fp64", 5, True, FP64, 60), ("lora", "fp32", 50, False, FP32, 60)],
)
def test_many_steps_under_moving_shares_have_the_losses_of_one_process(
    pool, method, precision, warmup, pieces, tolerance, steps
):
    """All of them over 200 steps: benchmarks/exactness.py."""
    ask = {"method": method, "precision": precision, "warmup": warmup, "pieces": pieces, "steps": steps}
    told = pool(3).run(cases_moving.losses, **ask, timeout_s=100.0)
    head = told[0]
    assert len(head["split"]) == len(head["alone"]) == steps
    pairs = zip(head["split"], head["alone"], strict=True)
    assert max(abs(split[1] - alone[1]) / abs(alone[1]) for split, alone in pairs) <= tolerance
    assert len({tuple(shares) for shares in head["shares"] if sum(shares) == 6}) >= 3
    assert sum(event["event"] == "shares" for event in head["events"]) >= 3
    assert _as_one([rank["read"] for rank in told]) == _as_one([head["whole"]])


def _as_one(reads):
    """The samples of every step in the order of the step: ranks do adjacent micro-batches, rank after rank."""
    steps = defaultdict(list)
    for read in reads:
        for step, sample in read:
            steps[step].append(sample)
    return dict(steps)


def test_a_run_that_is_interrupted_after_shares_moved_goes_on_with_the_same_losses(pool, tmp_path):
    told = pool(3).run(cases_moving.interrupted, folder=str(tmp_path), stop_at=21)[0]
    assert [step for step, *_ in told["pieces"]] == [step for step, *_ in told["through"]] == [*range(1, 41)]
    for piece, whole in zip(told["pieces"], told["through"], strict=True):
        assert piece[1] == pytest.approx(whole[1], rel=FP64)
    before, after = told["shares"]
    assert before[0] != before[-1]
    assert len({tuple(shares) for shares in after}) >= 2


@pytest.mark.parametrize("slowdown", [1.0, 2.0, 3.5])
def test_a_slowed_rank_takes_as_long_as_it_is_told_whatever_its_share(pool, slowdown):
    """1 ms per token, times the slowdown; sleep is never taken for computing, which would be slept for again."""
    counts = [5, 5, 2, 10, 1, 7, 0, 3]
    first, *later = pool(1).run(cases_moving.paced, slowdown=slowdown, counts=counts)[0]
    assert first > 0.001
    assert later[5] is None
    warm = [each for each in later[1:] if each is not None]
    assert warm == pytest.approx([0.001 * slowdown] * len(warm))


@pytest.mark.parametrize("slowdown", [1.0, 2.0, 3.5])
def test_the_probe_finds_a_slowed_rank_as_slow_as_it_is_told_and_leaves_no_gradient(pool, slowdown):
    (found,) = pool(1).run(cases_moving.probed, slowdown=slowdown)
    assert found["token_s"] == pytest.approx(0.001 * slowdown)
    assert found["left"] == 0.0


def test_all_ranks_know_all_times_alike_to_the_last_bit(pool):
    by_rank = pool(3).run(cases_moving.reports)
    for step in zip(*by_rank, strict=True):
        assert [rank["all"] for rank in step] == [[rank["own"] for rank in step]] * 3
