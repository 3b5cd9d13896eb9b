"""The gang of one attempt, and those that follow from it."""

import dataclasses
import random

import pytest

from gangline.errors import UsageError
from gangline.runs.gang import Gang, GangRank, OwnSettings
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob

GANG = Gang(run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=f"pc{n}", share=n) for n in (1, 2, 3)))
JOB = Job(name="small", model=ModelJob(path="m"), data=DataJob(train=SourceJob()), batch=24, micro_batch=4)


def own_settings(unit, settings, **more):
    """The gang with a size and a recomputation for every rank; unit: the run's micro-batch."""
    ranks = [
        dataclasses.replace(rank, micro_batch_size=size, activation_checkpointing=way)
        for rank, (size, way) in zip(GANG.ranks, settings, strict=True)
    ]
    return dataclasses.replace(GANG, ranks=tuple(ranks), micro_batch=unit, **more)


def test_the_work_of_a_host_that_is_lost_goes_to_the_others_in_proportion():
    gang = GANG.on(["pc1", "pc3"], attempt=2, resume_step=40)
    assert [(rank.host, rank.share) for rank in gang.ranks] == [("pc1", 2), ("pc3", 4)]
    assert (gang.attempt, gang.resume_step) == (2, 40)


def test_of_smaller_micro_batches_everybody_does_more():
    gang = GANG.in_smaller(2, before=8)
    assert ([rank.share for rank in gang.ranks], gang.micro_batch) == ([4, 8, 12], 2)


def test_ranks_have_settings_of_their_own_and_all_others_have_the_job_s():
    gang = own_settings(1, [(1, True), (3, False), (8, None)])
    assert gang.pass_lengths(1) == (1, 3, 8)
    assert [gang.settings_of(rank, JOB).micro_batch for rank in range(3)] == [1, 1, 1]
    assert [gang.settings_of(rank, JOB).activation_checkpointing for rank in range(3)] == [True, False, False]
    gang.require_settings(JOB)
    assert GANG.pass_lengths(4) == (1, 1, 1)
    assert GANG.settings_of(0, JOB) == JOB


def test_a_gang_of_before_has_one_setting_for_all_ranks():
    written = GANG.to_json()
    for rank in written["ranks"]:
        del rank["micro_batch_size"], rank["activation_checkpointing"]
    assert Gang.from_json(written) == GANG


@pytest.mark.parametrize(
    ("strategy", "unit", "settings", "what"),
    [
        ("ddp", 2, [(2, None), (3, None), (8, None)], r"multiples of 2, found 2, 3, 8"),
        ("zero-2", 1, [(1, None), (3, None), (8, None)], r"sizes 1, 3, 8"),
        ("zero-2", None, [(None, True), (None, None), (None, None)], r"activation_checkpointing on some ranks"),
        ("tp", 1, [(1, None), (3, None), (8, None)], r"sizes 1, 3, 8"),
        ("pipeline", None, [(4, True), (8, None), (8, None)], r"sizes 4, 8"),
    ],
)
def test_settings_that_cannot_be_are_refused(strategy, unit, settings, what):
    gang = own_settings(unit, settings, strategy=strategy)
    with pytest.raises(UsageError, match=what):
        gang.require_settings(JOB)


def test_settings_that_are_those_of_the_job_are_taken_by_every_strategy():
    own_settings(None, [(4, False)] * 3, strategy="zero-2").require_settings(JOB)
    own_settings(4, [(None, None)] * 3, strategy="pipeline").require_settings(JOB)


def test_a_rank_moves_inputs_of_layers_where_the_strategy_can():
    moving = tuple(
        dataclasses.replace(rank, activation_checkpointing=True, activation_offloading=number == 1)
        for number, rank in enumerate(GANG.ranks)
    )
    gang = dataclasses.replace(GANG, ranks=moving)
    gang.require_settings(JOB)
    assert [gang.settings_of(rank, JOB).activation_offloading for rank in range(3)] == [False, True, False]
    assert GANG.settings_of(0, dataclasses.replace(JOB, activation_offloading=True)).activation_offloading
    with pytest.raises(UsageError, match=r"does not offload activations"):
        dataclasses.replace(gang, strategy="pipeline").require_settings(JOB)


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd", "fsdp", "hsdp", "pipeline", "tp"])
def test_a_recomputation_of_each_rank_s_own_is_taken_by_strategies_that_know_it(strategy):
    own_settings(None, [(4, True), (4, False), (4, None)], strategy=strategy).require_settings(JOB)


def test_ranks_that_compute_every_layer_together_recompute_together():
    both = dataclasses.replace(GANG, ranks=tuple(dataclasses.replace(each, host="pc1") for each in GANG.ranks))
    sliced = dataclasses.replace(both, strategy="tp")
    smaller = sliced.with_settings(OwnSettings(rank=1, activation_checkpointing=True), JOB)
    smaller.require_settings(JOB)
    assert [rank.activation_checkpointing for rank in smaller.ranks] == [True] * 3
    ranks = (dataclasses.replace(sliced.ranks[0], activation_checkpointing=True), *sliced.ranks[1:])
    with pytest.raises(UsageError, match=r"activation_checkpointing on some of them alone"):
        dataclasses.replace(sliced, ranks=ranks).require_settings(JOB)


def test_a_rank_that_takes_smaller_passes_leaves_the_others_theirs():
    gang = GANG.with_settings(OwnSettings(rank=1, micro_batch_size=2), JOB)
    assert (gang.micro_batch, [rank.share for rank in gang.ranks]) == (2, [2, 4, 6])
    assert [rank.micro_batch_size for rank in gang.ranks] == [4, 2, 4]
    assert gang.pass_lengths(2) == (2, 1, 2)
    gang = gang.with_settings(OwnSettings(rank=2, micro_batch_size=1), JOB)
    assert (gang.micro_batch, [rank.share for rank in gang.ranks]) == (1, [4, 8, 12])
    assert [rank.micro_batch_size for rank in gang.ranks] == [4, 2, 1]
    gang = gang.with_settings(OwnSettings(rank=2, activation_checkpointing=True), JOB)
    assert gang.micro_batch == 1
    assert [gang.settings_of(rank, JOB).activation_checkpointing for rank in range(3)] == [False, False, True]
    left = gang.on(["pc1", "pc3"], attempt=2, resume_step=40)
    assert [(rank.share, rank.micro_batch_size) for rank in left.ranks] == [(6, 4), (18, 1)]


def test_what_is_written_is_read(tmp_path):
    gang = GANG.in_smaller(1, before=2)
    gang.save(tmp_path / "gang.json")
    assert Gang.load(tmp_path / "gang.json") == gang


PIPELINE = Gang(
    run_id="calm-otter-7",
    attempt=1,
    ranks=tuple(GangRank(host=f"pc{n}", share=24, planned_bytes=n) for n in (1, 2, 3)),
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
    assert SLICES.replica_groups == (0, 0, 1, 1, 2, 2)
    assert PIPELINE.replica_groups == (0, 0, 0)
    assert GANG.replica_groups == (0, 1, 2)
    gang = SLICES.on(["pc1", "pc3"], attempt=2, resume_step=40)
    assert [(rank.host, rank.share) for rank in gang.ranks] == [("pc1", 6), ("pc1", 6), ("pc3", 18), ("pc3", 18)]
    assert gang.replica_groups == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("left", "stages"), [(("pc1", "pc3"), (17, 23)), (("pc2", "pc3"), (15, 25)), (("pc2",), (40,))]
)
def test_the_layers_of_a_host_that_is_lost_go_to_the_others_in_proportion(left, stages):
    gang = PIPELINE.on(left, attempt=2, resume_step=40)
    assert (gang.strategy, gang.stages, gang.hosts) == ("pipeline", stages, left)
    assert {(rank.share, rank.planned_bytes) for rank in gang.ranks} == {(24, None)}


def test_a_host_that_comes_back_has_its_layers_again():
    assert PIPELINE.on(PIPELINE.hosts, attempt=3, resume_step=40).stages == (13, 10, 17)
    assert [rank.planned_bytes for rank in PIPELINE.on(PIPELINE.hosts, attempt=3, resume_step=40).ranks] == [1, 2, 3]


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


def pipelines(*layers, shares, replicas):
    ranks = tuple(GangRank(host=f"pc{n}", share=share) for n, share in enumerate(shares, start=1))
    return Gang(run_id="calm-otter-7", attempt=1, ranks=ranks, strategy="pipeline", stages=layers, replicas=replicas)


UNLIKE = pipelines(23, 17, 20, 12, 8, shares=(14, 14, 6, 6, 6), replicas=2)
THREE = pipelines(10, 10, 10, 10, 10, 10, shares=(4,) * 6, replicas=3)


def test_of_several_pipelines_each_is_a_crew_of_its_own(tmp_path):
    assert UNLIKE.replica_groups == (0, 0, 1, 1, 1)
    assert [UNLIKE.row_of(rank) for rank in (0, 1, 2, 4)] == [range(2), range(2), range(2, 5), range(2, 5)]
    again = UNLIKE.on(UNLIKE.hosts, attempt=2, resume_step=40)
    assert again == dataclasses.replace(UNLIKE, attempt=2, resume_step=40)
    again.save(tmp_path / "gang.json")
    assert Gang.load(tmp_path / "gang.json") == again


@pytest.mark.parametrize(
    ("gang", "lost", "stages", "replicas", "shares"),
    [
        (UNLIKE, {"pc5"}, (13, 9, 11, 7), 1, (20,) * 4),  # 20 and 12 layers are no whole model
        (UNLIKE, {"pc1", "pc2"}, (20, 12, 8), 1, (20,) * 3),
        (UNLIKE, {"pc1", "pc2", "pc5"}, (25, 15), 1, (20,) * 2),  # no way without more layers than before
        (THREE, {"pc1"}, (10, 10, 7, 7, 6), 2, (5, 5, 7, 7, 7)),
        (THREE, {"pc1", "pc5"}, (10, 10, 10, 10), 2, (6,) * 4),
        (pipelines(1, 1, 1, 1, shares=(4,) * 4, replicas=2), {"pc1"}, (1, 1), 1, (8, 8)),  # one has nothing to do
    ],
)
def test_whoever_is_left_of_a_broken_pipeline_becomes_a_part_of_another(gang, lost, stages, replicas, shares):
    later = gang.on([host for host in gang.hosts if host not in lost], attempt=2, resume_step=40)
    assert (later.stages, later.replicas) == (stages, replicas)
    assert tuple(rank.share for rank in later.ranks) == shares


def test_nobody_has_more_layers_than_before_if_that_can_be():
    dice = random.Random(8)
    for _ in range(200):
        depth, replicas = dice.randint(8, 40), dice.randint(2, 5)
        cuts = [sorted(dice.sample(range(1, depth), dice.randint(1, 5))) for _ in range(replicas)]
        layers = [b - a for cut in cuts for a, b in zip((0, *cut), (*cut, depth), strict=True)]
        work_split = [dice.randint(row == 0, 9) for row in range(replicas)]
        shares = [share for share, cut in zip(work_split, cuts, strict=True) for _ in (0, *cut)]
        gang = pipelines(*layers, shares=shares, replicas=replicas)
        left = sorted(dice.sample(range(len(layers)), dice.randint(1, len(layers))))
        later = gang.on([f"pc{n + 1}" for n in left], attempt=2, resume_step=None)
        assert [sum(later.stages[rank] for rank in row) for row in later.rows] == [depth] * later.replicas
        assert sum(later.ranks[row[0]].share for row in later.rows) == sum(
            gang.ranks[row[0]].share for row in gang.rows
        )
        if sum(layers[n] for n in left) >= depth:
            before = {rank.host: own for rank, own in zip(gang.ranks, layers, strict=True)}
            assert all(own <= before[rank.host] for rank, own in zip(later.ranks, later.stages, strict=True))
        else:
            assert later.replicas == 1


def test_smaller_micro_batches_leave_the_layers_where_they_are(tmp_path):
    gang = PIPELINE.in_smaller(2, before=4)
    assert (gang.stages, [rank.share for rank in gang.ranks]) == ((13, 10, 17), [48, 48, 48])
    gang.save(tmp_path / "gang.json")
    assert Gang.load(tmp_path / "gang.json") == gang
