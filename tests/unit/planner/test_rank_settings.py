"""Micro-batch and recomputation of every rank's own: the search for them, and what comes of it on machines together."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from gangline.catalog.gpu_specs import GPUS
from gangline.planner.candidate import Candidate, EvaluationContext, PlanQuery, RankSettings, Scenario
from gangline.planner.decision import MOVED_FASTER, best_of_kinds, choose, decide
from gangline.planner.estimate import uncalibrated
from gangline.planner.machines import Placement, PlannedCluster
from gangline.planner.plan import make_plan
from gangline.planner.rank_settings import SLACK, with_own_recomputation, with_own_settings
from gangline.planner.report import Length, choice_json, explain, report
from gangline.planner.speed import ComputeModel, copies_s
from gangline.planner.traffic import LinkModel
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang
from gangline.runs.job import StrategyJob
from tests.unit.planner.test_plan import JOB
from tests.unit.planner.worlds import query, with_memory, world

FREE = LinkModel(latency_s=0.0, bytes_per_s=1e18, source="a link that costs nothing")
WAYS = ((False, False), (True, False), (True, True))
"""Recomputation, and whether its inputs lie in the machine's memory."""
UNLIKE = "pc1=rtx4090,pc2=rtx3060"


def of_ddp(job: PlanQuery) -> PlanQuery:
    return dataclasses.replace(job, strategy=StrategyJob(kind="ddp"))


def units(job: PlanQuery, machines: PlannedCluster) -> list[Scenario]:
    """One sample at a time, with and without recomputation."""
    cache = EvaluationContext()
    trainings = [dataclasses.replace(job.training, micro_batch=1, checkpointing=each) for each in (False, True)]
    return [Scenario(query=job, world=machines, training=each, cache=cache) for each in trainings]


def every_way(job: PlanQuery, machines: PlannedCluster, strategy: PlannedStrategy) -> Iterator[Candidate]:
    """Every share of every rank, in every number of passes, with and without recomputation, from inputs in the machine's
    memory as well: those that fit.
    """
    first, count = units(job, machines)[0], len(machines.placements)

    def settings(share: int) -> Iterator[RankSettings]:
        for (checkpointing, offloading), passes in itertools.product(WAYS, range(1, share + 1) if share else (0,)):
            longest, several = -(-share // passes) if passes else 1, 2 if passes > 1 else 1
            own = {"checkpointing": checkpointing, "offloading": offloading, "accumulation": several}
            training = dataclasses.replace(first.training, micro_batch=longest, **own)
            yield RankSettings(training=training, share=share, passes=passes)

    for shares in itertools.product(range(job.batch + 1), repeat=count):
        if sum(shares) == job.batch:
            for each in itertools.product(*map(settings, shares)):
                candidate = Candidate(scenario=dataclasses.replace(first, settings=each), strategy=strategy)
                if candidate.fits:
                    yield candidate


@pytest.mark.parametrize(
    ("hosts", "gib", "batch", "wire"),
    [
        ("rtx4090,rtx3060", (24, 12), 6, "1gbit"),
        ("rtx4090,rtx3060", (10, 7.5), 6, "10gbit"),
        ("rtx4090,rtx4080,rtx3060", (24, 8, 7.5), 3, "1gbit"),
        ("rtx3090,rtx3090", (15.5, 24), 7, "1gbit"),
        ("rtx4090", (18,), 9, "1gbit"),
    ],
)
def test_the_choice_is_that_of_a_search_over_all_settings(
    hosts: str, gib: tuple[float, ...], batch: int, wire: str
) -> None:
    job, machines = query(batch=batch), with_memory(world(hosts, wire=wire), *gib)
    strategy = PlannedStrategy(kind="ddp" if len(gib) > 1 else "single", world_size=len(gib))
    found = [Candidate(scenario=each, strategy=strategy) for each in with_own_settings(units(job, machines), strategy)]
    least_s = min(each.seconds for each in every_way(job, machines, strategy))
    assert all(each.fits for each in found)
    assert min(each.seconds for each in found) == pytest.approx(least_s, rel=1e-9)
    assert max(each.seconds for each in found) <= least_s * SLACK


@pytest.mark.parametrize(
    ("hosts", "gib", "batch", "wire", "reshard"),
    [
        ("rtx4090,rtx3060", (24, 12), 6, "1gbit", True),
        ("rtx4090,rtx3060", (7.5, 5.2), 6, "10gbit", True),
        ("rtx4090,rtx4080,rtx3060", (24, 6, 5.5), 3, "100gbit", True),
        ("rtx3090,rtx3090", (9, 24), 7, "10gbit", False),
    ],
)
def test_where_weights_lie_in_parts_the_choice_is_that_of_a_search_over_all_settings(
    hosts: str, gib: tuple[float, ...], batch: int, wire: str, reshard: bool
) -> None:
    """Passes are exchanges: all ranks make as many, of unlike sizes."""
    job, machines = query(batch=batch), with_memory(world(hosts, wire=wire), *gib)
    strategy = PlannedStrategy(kind="fsdp", world_size=len(gib), shard_size=len(gib), reshard=reshard)
    found = [Candidate(scenario=each, strategy=strategy) for each in with_own_settings(units(job, machines), strategy)]
    least_s = min(each.seconds for each in every_way(job, machines, strategy))
    assert all(each.fits for each in found)
    assert min(each.seconds for each in found) == pytest.approx(least_s, rel=1e-9)


def test_ranks_whose_passes_are_exchanges_take_passes_by_their_speed() -> None:
    job = dataclasses.replace(query(batch=32), strategy=StrategyJob(kind="fsdp"))
    choice = decide(job, world("pc1=rtx4090,pc2=rtx3060", wire="100gbit"))
    best = next(each for each in choice.by_kind if each.strategy.kind == "fsdp")
    large, small = best.scenario.settings
    assert large.passes == small.passes
    assert large.share > 2 * small.share
    alike = Candidate(scenario=units(job, world("pc1=rtx4090,pc2=rtx3060", wire="100gbit"))[0], strategy=best.strategy)
    assert best.seconds < 0.7 * alike.seconds
    assert best.traffic.micro_batches == large.passes


def every_stage(job: PlanQuery, machines: PlannedCluster) -> Iterator[Candidate]:
    """Every cut of the layers, every rank with and without recomputation: those that fit."""
    plain, again = units(job, machines)
    count, depth = len(machines.placements), job.architecture.num_layers
    trainings = [dataclasses.replace(each.training, accumulation=2) for each in (plain, again)]
    for cut in itertools.product(range(1, depth), repeat=count - 1):
        stages = (*cut, depth - sum(cut))
        for recomputes in itertools.product((False, True), repeat=count) if stages[-1] > 0 else ():
            own = tuple(RankSettings(training=trainings[each], share=plain.count, passes=None) for each in recomputes)
            strategy = PlannedStrategy(kind="pipeline", world_size=count, stages=stages)
            candidate = Candidate(scenario=dataclasses.replace(plain, settings=own), strategy=strategy)
            if candidate.fits:
                yield candidate


@pytest.mark.parametrize(("hosts", "gib"), [("rtx4090,rtx3060", (9, 7)), ("rtx4090,rtx4070", (6, 9))])
def test_stages_that_recompute_are_those_of_a_search_over_all_cuts(hosts: str, gib: tuple[float, ...]) -> None:
    """But for the time in which a pipeline fills and drains: layers are cut for the shortest slowest stage."""
    job, machines = query(batch=8), with_memory(world(hosts, wire="10gbit"), *gib)
    plain, again = units(job, machines)
    strategy = PlannedStrategy(kind="pipeline", world_size=len(gib), stages=(1,) * len(gib))
    found = [Candidate(scenario=s, strategy=way) for way, s in with_own_recomputation(plain, again, strategy)]
    fitting = [each for each in found if each.fits and not each.strategy.eager]
    assert {own.training.checkpointing for own in fitting[0].scenario.settings} == {True, False}
    slowest_s = [max(each.time.compute_s) for each in every_stage(job, machines) if each.time is not None]
    assert fitting[0].time is not None
    assert max(fitting[0].time.compute_s) == pytest.approx(min(slowest_s), rel=1e-9)


def test_a_stage_recomputes_where_that_lets_a_fast_card_have_more_layers() -> None:
    job = dataclasses.replace(query(batch=8), strategy=StrategyJob(kind="pipeline"))
    machines = with_memory(world("pc1=rtx4090,pc2=rtx3060", wire="10gbit"), 9, 7)
    best = next(each for each in decide(job, machines).by_kind if each.strategy.kind == "pipeline")
    assert {own.training.checkpointing for own in best.scenario.settings} == {True, False}
    alike = [dataclasses.replace(job.training, checkpointing=each) for each in (False, True)]
    fixed = [dataclasses.replace(job, training=each, open=("micro_batch",)) for each in alike]
    others = [next(e for e in decide(each, machines).by_kind if e.strategy.kind == "pipeline") for each in fixed]
    assert all(best.seconds < each.seconds for each in others if each.fits)


def test_under_tp_a_host_recomputes_with_all_of_its_ranks() -> None:
    job = dataclasses.replace(query(method="lora", batch=32), strategy=StrategyJob(kind="tp"))
    machines = world("pc1=2xrtx4090,pc2=2xrtx3060", wire="10gbit")
    choice = decide(job, machines)
    best = next(each for each in choice.by_kind if each.strategy.kind == "tp")
    assert [own.training.checkpointing for own in best.scenario.settings] == [False, False, True, True]
    assert best.fits
    both = dataclasses.replace(
        job, training=dataclasses.replace(job.training, checkpointing=True), open=("micro_batch",)
    )
    alike = next(each for each in decide(both, machines).by_kind if each.strategy.kind == "tp")
    assert best.seconds < alike.seconds
    text = "\n".join(report(choice, Length(None), width=400))
    assert "with activation checkpointing on pc2" in text


def test_a_small_card_beside_a_large_one_decides_for_itself_alone() -> None:
    choice = decide(query(batch=32), world(UNLIKE))
    best = choice.best
    assert best is not None
    large, small = best.scenario.settings
    assert (large.training.checkpointing, small.training.checkpointing) == (False, True)
    assert small.training.micro_batch > large.training.micro_batch
    assert large.share + small.share == 32
    assert best.seconds < choice.alone_s["pc1"] < choice.alone_s["pc2"]
    assert choice.part_of_sum is not None
    assert choice.part_of_sum >= 0.97
    text = "\n".join(report(choice, Length(None), width=400))
    assert f"the sum    {100 * choice.part_of_sum:.1f} % of what all machines do in sum" in text
    assert f"pc1 {large.share} (88 %) as {large.passes} x 1, pc2 {small.share} (12 %) as {small.passes} x" in text
    assert "is faster than all" not in text
    told = choice_json(choice, [])
    assert told["alone"] == choice.alone_s
    assert [each["activation_checkpointing"] for each in told["best"]["ranks"]] == [False, True]
    assert [each["micro_batch_size"] for each in told["best"]["ranks"]] == [1, small.training.micro_batch]


def test_the_gang_has_the_settings_of_its_plan() -> None:
    choice = decide(query(batch=32), world(UNLIKE))
    assert choice.runnable is not None
    job = dataclasses.replace(JOB, batch=32, micro_batch=1)
    hosts = tuple(Host(name=name, workdir="/work", python="python") for name in ("pc1", "pc2"))
    cluster = Cluster(name="home", hosts=hosts)
    plan = make_plan(job, cluster, {"pc1": ["RTX 4090"], "pc2": ["RTX 3060"]}, candidate=choice.runnable)
    gang = plan.gang("calm-otter-7", 1)
    for rank, own in zip(gang.ranks, choice.runnable.scenario.settings, strict=True):
        assert (rank.share, rank.micro_batch_size) == (own.share, own.training.micro_batch)
        assert rank.activation_checkpointing == own.training.checkpointing
    gang.require_settings(job)
    assert Gang.from_json(gang.to_json()) == gang
    text = "\n".join(explain(plan))
    assert "32 samples, in forward passes of each rank's own size" in text
    assert "recomputed" in text


LONG = {"batch": 8, "sequence_length": 16384}
"""Of which a card of 12 GB has no room for the inputs of all layers."""


def test_a_card_without_another_way_has_inputs_of_layers_in_its_machine_s_memory() -> None:
    choice = decide(of_ddp(query(**LONG)), world(UNLIKE, wire="10gbit"))
    assert choice.runnable is not None
    assert choice.runnable.fits
    large, small = (own.training for own in choice.runnable.scenario.settings)
    assert (large.checkpointing, large.offloading) == (True, False)
    assert (small.checkpointing, small.offloading) == (True, True)
    assert choice.runnable.host_memory["pc2"][0] > 0
    text = "\n".join(report(choice, Length(None), width=400))
    assert "o: with activation checkpointing whose inputs lie in the machine's memory" in text
    job = dataclasses.replace(JOB, batch=8, micro_batch=1)
    cluster = Cluster(name="home", hosts=tuple(Host(name=n, workdir="/work", python="python") for n in ("pc1", "pc2")))
    plan = make_plan(job, cluster, {"pc1": ["RTX 4090"], "pc2": ["RTX 3060"]}, candidate=choice.runnable)
    gang = plan.gang("calm-otter-7", 1)
    gang.require_settings(job)
    assert [gang.settings_of(rank, job).activation_offloading for rank in (0, 1)] == [False, True]


def test_what_a_machine_s_memory_has_no_room_for_is_not_moved_there() -> None:
    machines = world(UNLIKE, wire="10gbit")
    small = tuple(dataclasses.replace(each, ram_bytes=1 << 30) for each in machines.placements)
    best = next(
        each
        for each in decide(of_ddp(query(**LONG)), dataclasses.replace(machines, placements=small)).by_kind
        if each.strategy.kind == "ddp"
    )
    assert not any(each.offloading for each in best.rank_trainings)
    assert not best.fits


def test_a_job_that_forbids_it_moves_nothing() -> None:
    job = of_ddp(query(**LONG))
    job = dataclasses.replace(job, open=tuple(key for key in job.open if key != "activation_offloading"))
    choice = decide(job, world(UNLIKE, wire="10gbit"))
    assert not any(own.offloading for each in choice.by_kind for own in each.rank_trainings)
    assert choice.runnable is None or choice.runnable.strategy.world_size == 1


def test_where_the_job_moves_inputs_on_all_ranks_settings_of_their_own_need_be_no_tenth_faster() -> None:
    job = query(batch=32, sequence_length=4096, checkpointing=True, offloading=True)
    job = of_ddp(dataclasses.replace(job, open=("micro_batch",)))
    machines = world(UNLIKE, wire="10gbit")
    own = next(each for each in decide(job, machines).by_kind if each.strategy.kind == "ddp")
    alike = min(
        each.seconds
        for size in (1, 2, 4, 8)
        for training in [dataclasses.replace(job.training, micro_batch=size)]
        for scenario in [Scenario(query=job, world=machines, training=training, cache=EvaluationContext())]
        for each in [Candidate(scenario=scenario, strategy=own.strategy)]
        if each.fits
    )
    assert own.scenario.settings
    assert alike / MOVED_FASTER < own.seconds < 0.98 * alike


def test_of_two_strategies_the_one_that_moves_inputs_has_to_be_a_tenth_faster() -> None:
    moved = decide(of_ddp(query(**LONG)), world(UNLIKE, wire="10gbit")).runnable
    assert moved is not None
    plain = Candidate(scenario=units(query(), world(UNLIKE))[1], strategy=PlannedStrategy(kind="fsdp", world_size=2))
    for seconds, taken in ((1.09, plain), (1.11, moved)):
        vars(plain)["seconds"] = seconds * moved.seconds * plain.samples / moved.samples
        assert choose([moved, plain]) is taken


def test_of_two_alike_cards_that_move_inputs_the_one_in_the_slower_slot_gets_less() -> None:
    slow = {"pcie3-x8": 1e9, "": 15e9}
    job = query(**{**LONG, "batch": 32})

    def compute(placement: Placement, asked: Training) -> ComputeModel | None:
        assert placement.spec is not None
        model = uncalibrated(placement.spec, job.architecture, asked)
        usual_s, own_s = (
            copies_s(job.architecture, asked, host_bytes_per_s=each) for each in (15e9, slow[placement.bus])
        )
        return dataclasses.replace(model, per_token_s=model.per_token_s + own_s - usual_s)

    machines = world("pc1=rtx3060,pc2=rtx3060", wire="10gbit")
    first, second = machines.placements
    machines = dataclasses.replace(machines, placements=(first, dataclasses.replace(second, bus="pcie3-x8")))
    choice = decide(of_ddp(dataclasses.replace(job, compute=compute)), machines)
    assert choice.runnable is not None
    fast, slower = choice.runnable.scenario.settings
    assert fast.training.offloading
    assert slower.training.offloading
    assert fast.share > slower.share


def test_what_the_job_fixes_all_ranks_have() -> None:
    job = of_ddp(dataclasses.replace(query(batch=32, micro_batch=2), open=("activation_checkpointing",)))
    best = decide(job, world(UNLIKE)).best
    assert best is not None
    assert {each.micro_batch for each in best.rank_trainings} == {2}
    assert sum(best.shares) == 16
    both = of_ddp(dataclasses.replace(query(batch=32, micro_batch=1, checkpointing=True), open=()))
    fixed = decide(both, world(UNLIKE)).best
    assert fixed is not None
    assert set(fixed.rank_trainings) == {fixed.training}


def test_dropout_by_sample_leaves_every_rank_its_own_micro_batch() -> None:
    free = decide(query(batch=32, dropout=0.1, draws_by_sample=True), world(UNLIKE)).best
    assert free is not None
    assert len({each.micro_batch for each in free.rank_trainings}) > 1


def test_dropout_by_micro_batch_leaves_every_rank_a_recomputation_of_its_own_alone() -> None:
    choice = decide(query(batch=32, dropout=0.1), world(UNLIKE))
    assert choice.best is not None
    assert len({each.micro_batch for each in choice.best.rank_trainings}) == 1
    assert [each.checkpointing for each in choice.best.rank_trainings] == [False, True]


def test_other_trainers_give_all_ranks_one_setting() -> None:
    base = query(batch=32)
    stack = dataclasses.replace(base.training.stack, name="transformers")
    job = dataclasses.replace(base, training=dataclasses.replace(base.training, stack=stack))
    kinds = best_of_kinds(job, world(UNLIKE), EvaluationContext())
    assert not any(each.scenario.settings for each in kinds)


def test_shares_of_the_cluster_file_stay_and_settings_follow_them() -> None:
    machines = world(UNLIKE)
    weighted = [dataclasses.replace(each, weight=w) for each, w in zip(machines.placements, (3.0, 1.0), strict=True)]
    best = decide(of_ddp(query(batch=32)), dataclasses.replace(machines, placements=tuple(weighted))).best
    assert best is not None
    assert best.shares[0] == 3 * best.shares[1]


CARDS = [spec.name for spec in GPUS if spec.bf16 and not spec.untrained and spec.memory_gb >= 8]


def test_machines_together_are_never_slower_than_one_but_for_the_network() -> None:
    chance = random.Random(28)
    job = query("meta-llama/Llama-3.2-1B", method="lora", targets=("all-linear",), sequence_length=1024, batch=32)
    job = of_ddp(job)  # benchmarks/plan_machines.py leaves the strategy open, and takes 200 sets
    for _ in range(12):
        hosts = ",".join(chance.choice(CARDS) for _ in range(chance.randint(2, 5)))
        for wire in (FREE, *(world("rtx4090", wire=each).wire for each in ("1gbit", "10gbit"))):
            choice = decide(job, dataclasses.replace(world(hosts), wire=wire))
            assert choice.best is not None, hosts
            assert choice.best.time is not None
            alone_s = min(each.best.seconds for each in choice.by_hosts if each.count == 1 and each.best is not None)
            allowed_s = 0.0 if wire is FREE else choice.best.time.exposed_s
            assert choice.best.seconds <= alone_s * (1 + 1e-9) + allowed_s, (hosts, wire.source)


def test_a_training_of_passes_has_the_bytes_of_the_longest() -> None:
    job, machines = query(batch=32), world(UNLIKE)
    best = decide(job, machines).best
    assert best is not None
    for need, own in zip(best.needs, best.scenario.settings, strict=True):
        training: Training = own.training
        alone = Scenario(query=job, world=machines, training=training, cache=EvaluationContext())
        rank = machines.placements.index(need.placement)
        assert need.memory == alone.fit(training).memory(best.strategy, rank)
