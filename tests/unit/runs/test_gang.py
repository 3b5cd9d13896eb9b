"""The gang of one attempt, and those that follow from it."""

import dataclasses
import random

import pytest

from gangline.runs.gang import Gang, GangRank

GANG = Gang(run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=f"pc{n}", share=n) for n in (1, 2, 3)))


def test_the_work_of_a_host_that_is_lost_goes_to_the_others_in_proportion():
    gang = GANG.on(["pc1", "pc3"], attempt=2, resume_step=40)
    assert [(rank.host, rank.share) for rank in gang.ranks] == [("pc1", 2), ("pc3", 4)]
    assert (gang.attempt, gang.resume_step) == (2, 40)


def test_of_smaller_micro_batches_everybody_does_more():
    gang = GANG.in_smaller(2, before=8)
    assert ([rank.share for rank in gang.ranks], gang.micro_batch) == ([4, 8, 12], 2)


def test_what_is_written_is_read(tmp_path):
    gang = GANG.in_smaller(1, before=2)
    gang.save(tmp_path / "gang.json")
    assert Gang.load(tmp_path / "gang.json") == gang


PIPELINE = Gang(
    run_id="calm-otter-7",
    attempt=1,
    ranks=tuple(GangRank(host=f"pc{n}", share=24, foreseen_bytes=n) for n in (1, 2, 3)),
    strategy="pipeline",
    stages=(13, 10, 17),
)


SLICES = Gang(
    run_id="calm-otter-7",
    attempt=1,
    ranks=tuple(GangRank(host=f"pc{n}", share=4 * n) for n in (1, 2, 3) for _ in range(2)),
    strategy="tp",
)


def test_ranks_of_a_host_that_do_the_same_are_dealt_to_as_one():
    assert SLICES.crews == (0, 0, 1, 1, 2, 2)
    assert PIPELINE.crews == (0, 0, 0)
    assert GANG.crews == (0, 1, 2)
    gang = SLICES.on(["pc1", "pc3"], attempt=2, resume_step=40)
    assert [(rank.host, rank.share) for rank in gang.ranks] == [("pc1", 6), ("pc1", 6), ("pc3", 18), ("pc3", 18)]
    assert gang.crews == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("left", "stages"), [(("pc1", "pc3"), (17, 23)), (("pc2", "pc3"), (15, 25)), (("pc2",), (40,))]
)
def test_the_layers_of_a_host_that_is_lost_go_to_the_others_in_proportion(left, stages):
    gang = PIPELINE.on(left, attempt=2, resume_step=40)
    assert (gang.strategy, gang.stages, gang.hosts) == ("pipeline", stages, left)
    assert {(rank.share, rank.foreseen_bytes) for rank in gang.ranks} == {(24, None)}


def test_a_host_that_comes_back_has_its_layers_again():
    assert PIPELINE.on(PIPELINE.hosts, attempt=3, resume_step=40).stages == (13, 10, 17)
    assert [rank.foreseen_bytes for rank in PIPELINE.on(PIPELINE.hosts, attempt=3, resume_step=40).ranks] == [1, 2, 3]


def test_whoever_is_left_has_as_many_layers_as_before_at_least_and_together_all_of_them():
    dice = random.Random(7)
    for _ in range(200):
        stages = [dice.randint(1, 9) for _ in range(dice.randint(2, 12))]
        ranks = tuple(GangRank(host=f"pc{n}", share=8) for n in range(len(stages)))
        gang = dataclasses.replace(PIPELINE, ranks=ranks, stages=tuple(stages))
        left = dice.sample(range(len(stages)), dice.randint(1, len(stages)))
        later = gang.on([f"pc{n}" for n in left], attempt=2, resume_step=None)
        assert sum(later.stages) == sum(stages)
        assert all(now >= stages[n] for now, n in zip(later.stages, sorted(left), strict=True))


def test_smaller_micro_batches_leave_the_layers_where_they_are(tmp_path):
    gang = PIPELINE.in_smaller(2, before=4)
    assert (gang.stages, [rank.share for rank in gang.ranks]) == ((13, 10, 17), [48, 48, 48])
    gang.save(tmp_path / "gang.json")
    assert Gang.load(tmp_path / "gang.json") == gang
