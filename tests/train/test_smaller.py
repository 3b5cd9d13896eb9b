"""Smaller micro-batches than the job says, where memory does not suffice: the same numbers."""

import pytest

from tests.train.attempts import START_S, Run
from tests.train.tolerances import FP64

HOSTS = ("pc1", "pc2")
STEPS = 6


@pytest.mark.parametrize(("shares", "micro_batch"), [([1, 1], 5), ([3, 2], 2)])
def test_the_size_of_a_micro_batch_does_not_change_the_losses(zygote, tmp_path, shares, micro_batch):
    found = []
    for name, work_split, words in (("whole", shares, {"micro_batch": micro_batch}), ("parts", [6, 4], {})):
        run = Run(zygote, tmp_path / name, steps=STEPS)
        ranks = run.start(1, HOSTS, work_split, **words)
        assert [rank.wait(timeout_s=START_S) for rank in ranks] == [0, 0], run.log(1, 0)
        found.append(run.steps())
    whole, parts = found
    assert len(parts) == STEPS
    assert whole == pytest.approx(parts, rel=FP64)
