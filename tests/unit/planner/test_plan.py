"""The plan: shares per rank, lengths when known, and nothing that was not computed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gangline.planner.plan import DataCount, Plan, make_plan
from gangline.planner.report import explain, lines_in_steps
from gangline.planner.shares import rows_named, stages_named
from gangline.planner.training import PlannedStrategy
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import (
    CheckpointJob,
    DataJob,
    EvaluationJob,
    Job,
    ModelJob,
    ScheduleJob,
    SourceJob,
    StrategyJob,
)
from gangline.strategies.pipeline.plan import pipeline
from tests.unit.planner.worlds import option_of, query, world

JOB = Job(
    name="tiny",
    model=ModelJob(path="/models/tiny"),
    data=DataJob(train=SourceJob(files=("/data/a.txt",))),
    batch=24,
    micro_batch=2,
)


def cluster(*shares: float | None) -> Cluster:
    hosts = tuple(
        Host(name=f"pc{number}", workdir=f"/w{number}", python="python", share=share)
        for number, share in enumerate(shares, 1)
    )
    return Cluster(name="home", hosts=hosts)


def test_each_rank_has_its_share_and_per_cent_of_the_batch() -> None:
    plan = make_plan(JOB, cluster(3, 2, 1))
    assert [(rank.host, rank.share, rank.percent) for rank in plan.ranks] == [
        ("pc1", 6, 50.0),
        ("pc2", 4, 33.3),
        ("pc3", 2, 16.7),
    ]


def test_steps_stay_open_until_the_data_is_counted() -> None:
    plan = make_plan(JOB, cluster(1))
    assert plan.steps is None
    counted = plan.with_data(JOB, DataCount(num_samples=100, num_tokens=51_200))
    assert counted.steps == 5
    assert "5 steps = 1 epoch over 100 samples, 51.2 k tokens" in "\n".join(explain(counted))


def test_parts_of_the_run_and_of_an_epoch_are_told_in_steps_once_these_are_known() -> None:
    data = dataclasses.replace(JOB.data, evaluation_fraction=0.1)
    job = dataclasses.replace(
        JOB,
        data=data,
        epochs=2.0,
        schedule=ScheduleJob(warmup_ratio=0.07),
        evaluation=EvaluationJob(every_epochs=0.25),
        checkpoint=CheckpointJob(every_epochs=1.0, every_minutes=None),
    )
    plan = make_plan(job, cluster(1))
    lines = "\n".join(explain(plan))
    assert "0.07 of all steps" in lines
    assert "every 0.25 epochs, at the end" in lines
    assert "every 1 epoch and at the end" in lines
    assert plan.saves is None
    counted = plan.with_data(job, DataCount(num_samples=10 * JOB.batch - 1))
    lines = "\n".join(explain(counted))
    assert "2 steps = 0.07 of 20, rounded up" in lines
    assert "at the start, every 0.25 epochs (steps 3, 5, 8, 10 ... 20), at the end" in lines
    assert "every 1 epoch (steps 10, 20) and at the end" in lines
    assert [line.split()[0] for line in lines_in_steps(counted)] == ["warm-up", "saves", "evaluates"]
    assert lines_in_steps(make_plan(JOB, cluster(1)).with_data(JOB, DataCount(num_samples=100))) == []
    assert Plan.from_json(json.loads(json.dumps(counted.to_json()))) == counted


def test_a_plan_survives_its_file() -> None:
    plan = make_plan(JOB, cluster(3, 2, 1)).with_data(JOB, DataCount(num_samples=100))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_rank_without_work_is_pointed_out() -> None:
    plan = make_plan(dataclasses.replace(JOB, batch=4), cluster(1, 1, 1))
    assert any("rank 2" in line and "batch" in line for line in explain(plan))


def test_the_gang_has_the_shares_of_the_plan() -> None:
    gang = make_plan(JOB, cluster(3, 2, 1)).gang("calm-otter-7", 2, resume_step=40)
    assert [rank.share for rank in gang.ranks] == [6, 4, 2]
    assert (gang.run_id, gang.attempt, gang.resume_step) == ("calm-otter-7", 2, 40)


def test_the_lines_name_what_will_happen_and_predict_nothing() -> None:
    lines = "\n".join(explain(make_plan(JOB, cluster(3, None))))
    assert "24 samples = 12 micro-batches of 2" in lines
    assert "pc1 9 (75 %), pc2 3 (25 %)" in lines
    assert "every 1 to 30 min (by what a save costs) and at the end" in lines
    assert "GiB" not in lines
    assert "tok/s" not in lines


@pytest.mark.parametrize(
    ("shares", "moving"), [((None, None), True), ((3, None), False), ((1, 1), False), ((None,), False)]
)
def test_shares_move_where_nobody_gave_one_and_the_plan_says_so(shares: tuple[float | None, ...], moving: bool) -> None:
    plan = make_plan(JOB, cluster(*shares))
    assert plan.gang("calm-otter-7", 1).moving_shares == moving
    assert any(line.startswith("speeds     measured before the first step") for line in explain(plan)) == moving


def test_hosts_that_train_apart_are_said_to_give_other_numbers() -> None:
    job = dataclasses.replace(JOB, strategy=StrategyJob(kind="local-sgd", inner_steps=20))
    plan = make_plan(job, cluster(None, None))
    assert plan.gang("calm-otter-7", 1).strategy == "local-sgd"
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    lines = "\n".join(explain(plan))
    assert "each of the 2 hosts trains apart for 20 steps" in lines
    assert "(int8); NOT the same numbers as one big machine" in lines
    assert "shares follow the speeds, so results depend on them" in lines
    assert "the one host trains by itself" in "\n".join(explain(make_plan(job, cluster(None))))


@pytest.mark.parametrize(("kind", "size"), [("hsdp", 2), ("fsdp", 4)])
def test_a_model_in_parts_keeps_its_shares_and_every_rank_knows_what_was_planned(kind: str, size: int) -> None:
    asked = query(method="lora")
    strategy = PlannedStrategy(kind=kind, world_size=4, shard_size=size, reshard=kind == "hsdp")  # type: ignore[arg-type]
    candidate = option_of(asked, world("pc1=2xa100-80gb,pc2=2xa100-80gb"), strategy, asked.training)
    micro_batch = candidate.training.micro_batch
    job = dataclasses.replace(JOB, micro_batch=micro_batch, batch=micro_batch * sum(candidate.shares))
    hosts = tuple(Host(name=f"pc{number}", workdir="/w", python="python", slots=2) for number in (1, 2))
    plan = make_plan(job, Cluster(name="two", hosts=hosts), candidate=candidate)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    gang = plan.gang("calm-otter-7", 1)
    assert (gang.strategy, gang.reshard, gang.moving_shares) == (kind, kind == "hsdp", False)
    needs = [need.memory.allocated_bytes for need in candidate.needs]
    assert [rank.planned_bytes for rank in gang.ranks] == needs
    assert [rank.planned_bytes for rank in gang.on(["pc1"], attempt=2, resume_step=3).ranks] == [None, None]
    assert [rank.planned_bytes for rank in gang.on(gang.hosts, attempt=2, resume_step=3).ranks] == needs


def test_in_a_pipeline_every_rank_does_all_micro_batches_of_some_of_the_layers() -> None:
    asked = query(method="lora")
    candidate = option_of(asked, world("pc1=2xa100-80gb,pc2=a100-80gb"), pipeline((13, 10, 9)), asked.training)
    job = dataclasses.replace(JOB, batch=24, micro_batch=1)
    hosts = tuple(Host(name=f"pc{number}", workdir="/w", python="python", slots=3 - number) for number in (1, 2))
    plan = make_plan(job, Cluster(name="two", hosts=hosts), candidate=candidate)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert {(rank.share, rank.percent) for rank in plan.ranks} == {(24, 100.0)}
    gang = plan.gang("calm-otter-7", 1)
    assert (gang.strategy, gang.stages, gang.moving_shares) == ("pipeline", (13, 10, 9), False)
    assert [rank.planned_bytes for rank in gang.ranks] == [need.memory.allocated_bytes for need in candidate.needs]
    lines = "\n".join(explain(plan))
    assert "every rank holds some of the layers (13/10/9); activations travel from one to the next" in lines
    assert "all 24 micro-batches go through every rank; layers: pc1 13+10, pc2 9" in lines
    assert "no work for" not in lines


def test_ranks_that_have_layers_between_them_have_the_share_of_their_host() -> None:
    asked = dataclasses.replace(query("meta-llama/Llama-3.1-8B", method="lora"), strategy=StrategyJob(kind="tp"))
    strategy = PlannedStrategy(kind="tp", world_size=4, shard_size=2)
    machines = world("pc1=2xrtx4090,pc2=2xrtx3060")
    candidate = option_of(asked, machines, strategy, asked.training)
    job = dataclasses.replace(JOB, batch=24, micro_batch=1, strategy=StrategyJob(kind="tp"))
    hosts = tuple(Host(name=f"pc{number}", workdir="/w", python="python", slots=2) for number in (1, 2))
    for plan in (make_plan(job, Cluster(name="two", hosts=hosts), candidate=candidate),
                 make_plan(job, Cluster(name="two", hosts=hosts))):  # fmt: skip
        first, same, second, _ = (rank.share for rank in plan.ranks)
        assert first == same
        assert first + second == 24
        gang = plan.gang("calm-otter-7", 1)
        assert (gang.strategy, gang.replica_groups, gang.moving_shares) == ("tp", (0, 0, 1, 1), True)
        lines = "\n".join(explain(plan))
        assert "the ranks of every host compute each layer together" in lines
        assert f"pc1 {first} ({100 * first / 24:.3g} %), pc2 {second} (" in lines
    alone = make_plan(job, Cluster(name="one", hosts=hosts[:1]))
    assert (alone.strategy, alone.moving_shares) == ("tp", False)
    single = (dataclasses.replace(hosts[0], slots=1), dataclasses.replace(hosts[1], slots=1))
    assert make_plan(job, Cluster(name="two", hosts=single)).strategy == "ddp"


def test_of_several_pipelines_each_has_its_share_and_is_named() -> None:
    asked = query(method="lora")
    ways = pipeline((18, 14, 16, 16), replicas=2)
    machines = world("pc1=a100-80gb,pc2=a100-80gb,pc3=rtx4090,pc4=rtx4090")
    candidate = option_of(asked, machines, ways, asked.training)
    assert sum(candidate.work_split) * asked.training.micro_batch == asked.batch
    assert candidate.work_split[0] > candidate.work_split[1]
    job = dataclasses.replace(JOB, batch=asked.batch, micro_batch=asked.training.micro_batch)
    hosts = tuple(Host(name=f"pc{number}", workdir="/w", python="python") for number in (1, 2, 3, 4))
    plan = make_plan(job, Cluster(name="four", hosts=hosts), candidate=candidate)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    gang = plan.gang("calm-otter-7", 1)
    assert (gang.replicas, gang.replica_groups, gang.moving_shares) == (2, (0, 0, 1, 1), False)
    assert tuple(rank.share for rank in gang.ranks) == candidate.shares
    first, second = candidate.work_split
    lines = "\n".join(explain(plan))
    assert "(18/14 + 16/16); activations travel from one to the next; gradients travel between the 2 pipelines" in lines
    assert f"micro-batches {first} through pc1 18, pc2 14; {second} through pc3 16, pc4 16 (layers)" in lines


def test_a_pipeline_of_which_no_layer_is_known_names_none_and_one_rank_is_none() -> None:
    job = dataclasses.replace(JOB, strategy=StrategyJob(kind="pipeline"))
    plan = make_plan(job, cluster(3, None))
    assert (plan.strategy, plan.stages, [rank.share for rank in plan.ranks]) == ("pipeline", (), [12, 12])
    assert "layers: not known" in "\n".join(explain(plan))
    assert make_plan(job, cluster(None)).strategy == "ddp"


def test_of_many_stages_the_first_and_the_last_are_named() -> None:
    assert stages_named((13, 10, 17)) == "13/10/17"
    assert rows_named([(13, 10, 17)]) == "13/10/17"
    assert rows_named([(13, 10), (12, 11)]) == "13/10 + 12/11"
    assert rows_named([(12, 11)] * 4) == "12/11 x 4"
    assert rows_named([(13, 10), (12, 11), (12, 11)]) == "13/10 + 12/11 + 1 more"
    assert stages_named((3, 3, 3, 2, 2, 2, 1)) == "3/3/3/.../1"


def test_equal_ranks_of_a_host_are_folded() -> None:
    hosts = (Host(name="box", workdir="/w", python="python", slots=4),)
    lines = "\n".join(explain(make_plan(JOB, Cluster(name="c", hosts=hosts))))
    assert "box 4 x 3 (25 % each)" in lines


def test_a_rank_knows_the_peak_of_its_own_gpu() -> None:
    gpus = {"pc1": ["NVIDIA GeForce RTX 4090"], "pc2": ["NVIDIA GeForce RTX 4090 Laptop GPU"]}
    gang = make_plan(JOB, cluster(3, 2, 1), gpus).gang("calm-otter-7", 1)
    assert [rank.peak_flops for rank in gang.ranks] == [165e12, None, None]


def test_hosts_that_are_one_machine_take_its_gpus_in_order_and_share_only_when_there_are_too_few() -> None:
    two = {f"pc{number}": ["NVIDIA A10", "NVIDIA A10"] for number in (1, 2, 3)}
    gang = make_plan(JOB, cluster(1, 1), two).gang("calm-otter-7", 1)
    assert ([rank.device for rank in gang.ranks], gang.shares_gpus) == ([0, 1], False)
    plan = make_plan(JOB, cluster(1, 1, 1), two)
    assert ([rank.device for rank in plan.ranks], plan.shares_gpus) == ([0, 1, 0], True)
    assert any("share a GPU" in line for line in explain(plan))
    assert not make_plan(JOB, cluster(1, 1, 1)).shares_gpus


def test_a_job_without_evaluation_data_says_so() -> None:
    assert any("never" in line and "data.eval" in line for line in explain(make_plan(JOB, cluster(1))))
