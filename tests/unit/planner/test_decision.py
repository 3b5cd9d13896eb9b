"""Which way to run a job is chosen, what it needs, and what more memory, machines or bandwidth change."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Literal

import pytest

from gangline.planner import decision, memory_fit
from gangline.planner import report as reports
from gangline.planner.candidate import Candidate, Compute, EvaluationContext, PlanQuery, lacking
from gangline.planner.decision import AS_FAST, Choice, best_of_kinds, decide
from gangline.planner.machines import Placement, PlannedCluster, link
from gangline.planner.memory import CPU, rank_memory
from gangline.planner.report import Length, choice_json, each_host, report, slower_than_alone, ways_lines
from gangline.planner.saves import Saving
from gangline.planner.speed import ComputeModel
from gangline.planner.training import PlannedStrategy, Training
from gangline.planner.ways_out import ways_out
from gangline.runs.job import StrategyJob
from gangline.units import format_duration
from tests.unit.planner.worlds import crowded, option_of, query, with_memory, world

EIGHT = "rtx4090,rtx4080,rtx3090,rtx3080,rtx4070,rtx4060,rtx3060,rtx5090"


def options_of(job: PlanQuery, machines: PlannedCluster) -> list[Candidate]:
    """The best option of every strategy, all that fit and those that do not."""
    return best_of_kinds(job, machines, EvaluationContext())


def kind(choice: Choice, name: str) -> Candidate:
    return next(candidate for candidate in choice.by_kind if candidate.strategy.kind == name)


def test_three_unlike_pcs_train_a_7b_adapter_side_by_side() -> None:
    choice = decide(query(), world())
    best = choice.best
    assert best is not None
    assert best.strategy.kind == "ddp"
    assert best.time is not None
    assert best.time.communication_share < 0.05
    # the slower a machine, the less it does
    seconds = dict(zip(best.world.hosts, best.time.compute_s, strict=True))
    assert max(seconds.values()) < 1.35 * min(seconds.values())
    assert best.shares[0] > best.shares[1]
    assert sum(best.shares) * best.training.micro_batch == 24


def test_equal_hosts_are_folded_on_the_screen() -> None:
    choice = decide(query(), world("rtx4090," * 8 + "rtx3060"))
    text = "\n".join(report(choice, Length((100, "100 steps"), Saving(every_minutes=10)), width=400))
    assert re.search(r" host1 to host8: +host9", text)
    assert re.search(r"shares .*: host1 to host8 each \d+ \(\d+ %\) as \d+ x \d+.*, host9 \d+", text)
    assert "8 (host1 to host8)" in text


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ("pc1 5, pc2 5", "pc1 5, pc2 5"),
        ("pc1 5, pc2 5, pc3 5, pc4 2", "pc1 to pc3 each 5, pc4 2"),
        ("a 1, b 1, c 1", "a, b, c each 1"),
        ("pc1 5, pc2 5, pc4 5, pc5 5, pc6 5", "pc1, pc2, pc4 to pc6 each 5"),
        (", ".join(f"n{2 * each} 5" for each in range(9)), "n0, n2, n4, n6 and 5 more each 5"),
        (", ".join(f"n{each} {each}" for each in range(9)), f"{', '.join(f'n{n} {n}' for n in range(8))} and 1 more"),
    ],
)
def test_neighbours_with_the_same_are_one_entry(shares: str, words: str) -> None:
    assert each_host([(host, share) for host, share in (each.split() for each in shares.split(", "))]) == words


def test_weights_that_travel_over_a_home_network_are_named_as_the_reason() -> None:
    choice = decide(query(method="lora", sequence_length=512), with_memory(world(), 24, 24, 24))
    assert choice.best is not None
    assert choice.best.strategy.kind == "ddp"
    sharded = kind(choice, "fsdp")
    assert sharded.seconds > 5 * choice.best.seconds
    lines = "\n".join(report(choice, Length((100, "100 steps"), Saving(every_minutes=10)), width=400))
    assert "weights for" in lines
    assert "over this link" in lines


def test_what_no_card_holds_alone_goes_through_them_in_layers() -> None:
    choice = decide(query("meta-llama/Llama-2-13b-hf", method="lora", sequence_length=512), world())
    assert choice.best is None or choice.best.strategy.kind == "pipeline"
    roomy = decide(
        query("meta-llama/Llama-2-13b-hf", method="lora", sequence_length=512), with_memory(world(), 16, 12, 12)
    )
    assert roomy.best is not None
    assert roomy.best.strategy.kind == "pipeline"
    assert sum(roomy.best.strategy.stages) == 40
    assert roomy.runnable == roomy.best
    assert not any(line.startswith("today") for line in report(roomy, Length(None)))


def test_a_pipeline_in_fp16_is_planned_and_what_is_done_today_is_another_way() -> None:
    job = query("meta-llama/Llama-2-13b-hf", method="lora", sequence_length=512, compute="fp16")
    choice = decide(job, with_memory(world(), 16, 12, 12))
    assert choice.best is not None
    assert choice.best.strategy.kind == "pipeline"
    assert choice.runnable is not None
    assert choice.runnable.strategy.kind == "fsdp"
    assert "cannot do pipeline with precision: fp16 yet" in "\n".join(report(choice, Length(None)))


def test_what_only_the_optimizer_stands_against_is_said_by_its_name() -> None:
    job = query("meta-llama/Llama-2-7b-hf", method="full", optimizer="adamw-8bit", sequence_length=512)
    job = dataclasses.replace(job, strategy=StrategyJob(kind="fsdp"))
    choice = decide(job, world("4xrtx4090"))
    assert choice.best is not None
    assert not choice.best.is_built
    said = f"cannot do {choice.best.strategy.kind} with optimizer: adamw-8bit and method: full yet"
    assert said in "\n".join(report(choice, Length(None), width=400))


def test_shares_of_the_cluster_file_are_layers_in_a_pipeline() -> None:
    job = query(method="lora", leave_open=False, checkpointing=True)
    job = dataclasses.replace(job, strategy=StrategyJob(kind="pipeline"))
    machines = with_memory(world("rtx4090,rtx4090,rtx4090"), 80, 80, 80)
    weights = zip(machines.placements, (3.0, 1.0, 0.0), strict=True)
    placements = tuple(dataclasses.replace(placement, weight=weight) for placement, weight in weights)
    (candidate,) = decide(job, dataclasses.replace(machines, placements=placements)).by_kind
    assert candidate.strategy.stages == (24, 7, 1)  # a layer is the least
    (candidate,) = decide(job, machines).by_kind
    assert candidate.strategy.stages == (11, 11, 10)


def test_where_sending_takes_time_more_micro_batches_are_on_their_way_if_there_is_room() -> None:
    job = query("meta-llama/Llama-3.1-8B", method="qlora", sequence_length=1024, batch=24)
    one_sample = ("activation_checkpointing",)
    job = dataclasses.replace(job, strategy=StrategyJob(kind="pipeline", replicas=1), open=one_sample)
    ample, tight = [24.0] * 3, [4.0] * 3
    found = {}
    for wire, gib in (("1gbit", ample), ("100gbit", ample), ("1gbit", tight)):
        machines = with_memory(world("rtx4090,rtx4090,rtx4090", wire=wire), *gib)
        (found[wire, gib[0]],) = decide(job, machines).by_kind
    slow, quick, small = found.values()
    assert slow.strategy.eager
    assert not quick.strategy.eager
    assert small.fits
    assert not small.strategy.eager
    assert slow.seconds < 0.98 * small.seconds
    assert slow.needs[0].memory.allocated_bytes > 1.3 * quick.needs[0].memory.allocated_bytes


def test_machines_for_two_pipelines_make_two_and_share_the_batch() -> None:
    """Llama-2-13B in 16 bits wants two such cards; six make three pipelines with a third of the bubble each."""
    job = query("meta-llama/Llama-2-13b-hf", method="lora", sequence_length=512, batch=24)
    job = dataclasses.replace(job, strategy=StrategyJob(kind="pipeline"))
    machines = with_memory(world(",".join(["rtx4090"] * 6), wire="10gbit"), *[24] * 6)
    (candidate,) = decide(job, machines).by_kind
    assert candidate.strategy.replicas == 3
    assert [sum(row) for row in candidate.strategy.rows] == [40] * 3
    assert candidate.fits
    assert candidate.work_split[0] == candidate.work_split[1] == candidate.work_split[2]
    auto = decide(dataclasses.replace(job, strategy=StrategyJob()), machines)
    assert auto.best is not None
    assert auto.best.strategy == candidate.strategy
    assert "gradients between pipelines" in {each.what for each in candidate.traffic.exchanges}
    times = {}
    for replicas in (1, 2, 3):
        asked = dataclasses.replace(job, strategy=StrategyJob(kind="pipeline", replicas=replicas))
        (one,) = decide(asked, machines).by_kind
        assert one.strategy.replicas == replicas
        times[replicas] = one.seconds
    assert times[3] == candidate.seconds == min(times.values())
    small = decide(job, with_memory(machines, *[14] * 6)).by_kind[0]  # three of them hold one
    assert small.strategy.replicas == 2


def test_one_table_at_both_ends_of_a_pipeline_is_trained_at_both() -> None:
    machines = with_memory(world("rtx4090,rtx4090"), 80, 80)
    for name, method, sums in (
        ("meta-llama/Llama-3.2-1B", "full", True),
        ("meta-llama/Llama-3.2-1B", "lora", False),
        ("meta-llama/Llama-2-7b-hf", "full", False),
    ):
        job = query(name, method=method, sequence_length=512, leave_open=False)
        asked = dataclasses.replace(job, strategy=StrategyJob(kind="pipeline"))
        (candidate,) = decide(asked, machines).by_kind
        assert (candidate.strategy.kind, candidate.is_built) == ("pipeline", True)
        assert ("gradients of the tied table" in {each.what for each in candidate.traffic.exchanges}) == sums
    assert "single" in {
        candidate.strategy.kind for candidate in decide(asked, with_memory(world("rtx4090"), 80)).by_kind
    }


def test_a_pipeline_of_a_model_that_cannot_be_entered_is_shown_and_not_taken() -> None:
    job = query("meta-llama/Llama-2-13b-hf", method="lora", checkpointing=True, sequence_length=1024)
    machines = with_memory(world("rtx4090,rtx4090,rtx4090"), 16, 16, 16)
    assert decide(job, machines).runnable == decide(job, machines).best
    for changes in ({"model_type": "granite"}, {"entry_dropout": "embd_pdrop"}):
        other = dataclasses.replace(job, architecture=dataclasses.replace(job.architecture, **changes))  # type: ignore[arg-type]
        choice = decide(other, machines)
        assert choice.best is not None
        assert (choice.best.strategy.kind, choice.best.is_built) == ("pipeline", False)
        assert choice.runnable is None or choice.runnable.strategy.kind != "pipeline"
        lines = " ".join("\n".join(report(choice, Length(None), width=400)).split())
        missing = lacking(choice.best.strategy, other.training, other.architecture)
        assert missing is not None
        assert f"cannot do {missing.what}" in lines


def test_ranks_that_share_a_gpu_are_weighed_with_what_they_can_do() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", sequence_length=512)
    cards = world("2xa100-80gb,2xa100-80gb", wire="hdr")
    choice = decide(job, crowded(cards, "host2"))
    assert {candidate.strategy.kind for candidate in choice.by_kind} == {"ddp", "local-sgd"}
    assert choice.runnable is not None
    assert choice.runnable.strategy.kind == "ddp"
    assert {"fsdp", "pipeline"} < {candidate.strategy.kind for candidate in decide(job, cards).by_kind}


def test_a_fast_fabric_makes_shards_worth_while() -> None:
    job = query("zai-org/GLM-4.5-Air", method="lora", batch=64, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    fast = decide(job, world("8xa100-80gb,8xa100-80gb", wire="hdr", inside="nvlink-a100"))
    slow = decide(job, world("8xa100-80gb,8xa100-80gb", wire="1gbit", inside="nvlink-a100"))
    assert fast.best is not None
    assert slow.best is not None
    # two pipelines inside the hosts need no recomputation, and so are a little faster than shards
    assert kind(fast, "fsdp").seconds < 1.2 * fast.best.seconds
    assert kind(slow, "fsdp").seconds > 100 * slow.best.seconds
    assert not kind(fast, "ddp").may_fit


def test_what_fits_nowhere_says_what_would_and_no_way_contains_another() -> None:
    choice = decide(query("meta-llama/Llama-2-7b-hf", method="full", sequence_length=2048), world())
    assert choice.best is None
    ways = ways_out(choice.query, choice.world)
    assert ways
    assert all(way.candidate.fits for way in ways)
    lines = "\n".join(ways_lines(ways))
    assert "method: qlora" in lines
    assert "one card with" in lines
    sets = [set(way.words) for way in ways]
    assert not any(one < other for one in sets for other in sets)


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "paged-adamw-8bit"])
@pytest.mark.parametrize(
    ("method", "built"),
    [
        ("full", {"ddp", "pipeline"}),
        ("lora", {"ddp", "fsdp", "hsdp", "pipeline"}),
        ("qlora", {"ddp", "fsdp", "hsdp", "pipeline"}),
    ],
)
def test_moments_of_8_bits_are_for_weights_that_some_rank_has_whole(
    optimizer: str, method: str, built: set[str]
) -> None:
    job = query("meta-llama/Llama-3.2-1B", method=method, optimizer=optimizer, sequence_length=512)
    choice = decide(job, world("2xa100-80gb,2xa100-80gb"))
    assert {candidate.strategy.kind for candidate in choice.by_kind if candidate.is_built} == built


def test_where_only_states_are_too_large_8_bits_of_them_are_a_way_out() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", batch=6, sequence_length=512)
    short = with_memory(world("rtx4090"), 20)
    ways = ways_out(job, short)
    assert ("optimizer.kind: adamw-8bit",) in [way.words for way in ways]


@pytest.mark.parametrize(
    ("checkpointing", "words"),
    [
        (True, "activation_offloading: true"),
        (False, "activation_checkpointing: true with activation_offloading: true"),
    ],
)
def test_long_rows_whose_layers_inputs_take_too_much_may_move_them(checkpointing: bool, words: str) -> None:
    job = query("meta-llama/Llama-2-7b-hf", method="qlora", sequence_length=16384, leave_open=False)
    job = dataclasses.replace(job, training=dataclasses.replace(job.training, checkpointing=checkpointing))
    short = with_memory(world("rtx4090"), 12)
    assert decide(job, short).best is None
    assert (words,) in [way.words for way in ways_out(job, short)]
    bare = dataclasses.replace(
        short, placements=tuple(dataclasses.replace(placement, gpu=None) for placement in short.placements)
    )
    assert "activation_offloading" not in "\n".join(ways_lines(ways_out(job, bare)))


def test_one_machine_that_is_faster_than_all_is_said() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", batch=48, sequence_length=512)
    choice = decide(job, with_memory(world("a=rtx5090,b=rtx5090", wire="100mbit"), 30, 30))
    assert choice.runnable is not None
    assert choice.by_hosts[0].runnable is not None
    assert choice.runnable.seconds > choice.by_hosts[0].runnable.seconds
    said = slower_than_alone(choice)
    assert said is not None
    assert said.startswith("one machine is faster than all: a alone ")
    named = re.search(r"the network is the cause: with (\S+) all would take", said)
    assert named is not None
    assert slower_than_alone(decide(job, with_memory(world("a=rtx5090,b=rtx5090", wire=named[1]), 30, 30))) is None


def test_a_machine_without_room_for_the_model_is_named_where_it_does_not_help() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="lora", targets=("all-linear",), sequence_length=1024, batch=32)
    job = dataclasses.replace(job, strategy=StrategyJob(kind="fsdp"))
    said = slower_than_alone(decide(job, with_memory(world("a=rtx4090,b=rtx3060", wire="100gbit"), 22, 4)))
    assert said is not None
    assert said.startswith("not all of these machines help: a alone ")


def test_the_machine_that_alone_can_hold_it_is_found_though_another_is_faster() -> None:
    job = query("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", method="full", batch=8, sequence_length=512)
    choice = decide(job, with_memory(world("fast=rtx5080,big=rtx3090", wire="10mbit"), 8, 24))
    alone = choice.by_hosts[0]
    assert alone.count == 1
    assert alone.runnable is not None
    assert alone.runnable.world.hosts == ("big",)
    assert choice.today is not None
    assert choice.today.world.hosts == ("big",)


def test_a_start_is_not_refused_because_something_that_is_not_built_fits_better() -> None:
    job = query("Qwen/Qwen2.5-0.5B", method="full", batch=8, sequence_length=1024, leave_open=False)
    cards = world("rtx4090,rtx4090", wire="10gbit")
    for gib in (x / 4 for x in range(20, 80)):
        choice = decide(job, with_memory(cards, gib, gib))
        chance = max(kind(choice, each).chance for each in ("ddp", "fsdp"))
        assert (choice.runnable is not None) == (chance >= 0.1)


@pytest.mark.parametrize("asked", ["ddp", "fsdp", "hsdp"])
def test_a_strategy_that_the_job_names_is_taken_whatever_is_faster(asked: str) -> None:
    for cards, taken in (
        ("2xa100-80gb,2xa100-80gb", asked),
        ("a100-80gb,2xa100-80gb", "fsdp" if asked == "hsdp" else asked),
    ):
        job = dataclasses.replace(query(method="lora"), strategy=StrategyJob(kind=asked))  # type: ignore[arg-type]
        choice = decide(job, world(cards, wire="hdr"))
        assert choice.best is not None
        assert choice.best.strategy.kind == taken
        assert choice.runnable == choice.best
    alone = decide(job, world("a100-80gb"))
    assert alone.best is not None
    assert alone.best.strategy.kind == "single"


def test_local_steps_are_never_taken_by_themselves_and_said_to_be_other_numbers() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", batch=96, sequence_length=2048)
    slow = decide(job, with_memory(world("rtx4090,rtx4090,rtx4090", wire="100mbit"), 48, 48, 48))
    assert slow.best is not None
    assert slow.best.is_exact
    assert kind(slow, "local-sgd").seconds < slow.best.seconds / 2
    lines = " ".join("\n".join(report(slow, Length(None), width=400)).split())
    assert "local-sgd would take" in lines
    assert "other numbers than one big machine" in lines
    assert f"instead of {format_duration(slow.best.seconds)}, with other numbers" in lines
    assert not kind(slow, "local-sgd").is_built


def rounds(**more: object) -> StrategyJob:
    return StrategyJob(kind="local-sgd", **more)  # type: ignore[arg-type]


def test_a_job_that_asks_for_local_steps_gets_them_with_its_own_numbers() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", batch=96, sequence_length=2048)
    cards = with_memory(world("rtx4090,rtx4090,rtx4090", wire="100mbit"), 48, 48, 48)
    asked = {
        steps: decide(dataclasses.replace(job, strategy=rounds(inner_steps=steps)), cards).runnable
        for steps in (20, 200)
    }
    for steps, taken in asked.items():
        assert taken is not None
        assert (taken.strategy.kind, taken.strategy.inner_steps, taken.strategy.payload) == ("local-sgd", steps, "int8")
        assert taken.is_built
    assert asked[200].seconds < asked[20].seconds  # type: ignore[union-attr]


def test_where_local_steps_fit_and_replicas_do_not_they_are_not_begun_unasked() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", batch=96, sequence_length=512)
    choice = decide(job, with_memory(world("rtx4090,rtx4090,rtx4090", wire="100mbit"), 27, 27, 27))
    assert (kind(choice, "local-sgd").fits, kind(choice, "ddp").fits) == (True, False)
    assert choice.runnable is None or choice.runnable.strategy.kind != "local-sgd"


def test_one_machine_has_nobody_to_train_apart_from() -> None:
    job = dataclasses.replace(query("Qwen/Qwen2.5-0.5B", method="full", batch=8), strategy=rounds())
    choice = decide(job, with_memory(world("rtx4090"), 48))
    assert choice.runnable is not None
    assert choice.runnable.strategy.kind == "single"


def test_ranks_that_wait_for_each_other_in_every_micro_batch_have_equal_shares() -> None:
    job = query("meta-llama/Llama-3.2-1B", method="full", batch=24, sequence_length=512, leave_open=False)
    choice = decide(job, with_memory(world(), 80, 80, 80))
    assert len(set(kind(choice, "fsdp").shares)) == 1
    assert len(set(kind(choice, "ddp").shares)) > 1


def test_a_pipeline_that_fits_only_tightly_is_shown_with_the_split_that_does() -> None:
    job = query("meta-llama/Llama-3.1-8B", method="lora", batch=32, leave_open=False, targets=("all-linear",))
    chances = []
    for length in (1536, 1700, 1800, 1850, 1950, 2048):
        asked = dataclasses.replace(job, training=dataclasses.replace(job.training, sequence_length=length))
        choice = decide(asked, with_memory(world("rtx4070,rtx3060,rtx3090"), 11.7, 11.7, 23.7))
        chances.append(kind(choice, "pipeline").chance)
    assert chances == sorted(chances, reverse=True)
    assert chances[3] > 0.5 or chances[2] < 0.9  # fifty tokens more are no cliff


@pytest.mark.parametrize("seed", range(6))
def test_more_memory_never_makes_a_plan_worse(seed: int) -> None:
    dice = random.Random(seed)
    job = query(method=dice.choice(("lora", "qlora", "full")), sequence_length=dice.choice((512, 1024, 2048)))
    before: Choice | None = None
    for gib in (4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 80, 141):
        machines = with_memory(world("rtx4090,rtx4090"), gib, gib)
        choice = decide(job, machines)
        if before is not None and before.best is not None and before.best.fits:
            assert choice.best is not None
            assert choice.best.seconds <= before.best.seconds * 1.021  # of two as fast, the simpler is taken
        before = choice
    assert before is not None
    assert before.best is not None


@pytest.mark.parametrize("seed", range(4))
def test_a_faster_link_never_makes_a_plan_slower(seed: int) -> None:
    dice = random.Random(seed)
    job = query(method=dice.choice(("lora", "full")), batch=dice.choice((6, 24, 48)))
    machines = with_memory(world("rtx4090,rtx3090,rtx3060"), 80, 80, 80)
    last = float("inf")
    for name in ("100mbit", "1gbit", "2.5gbit", "10gbit", "100gbit", "hdr"):
        options = options_of(job, dataclasses.replace(machines, wire=link(name)))
        fastest = min(candidate.seconds for candidate in options if candidate.is_exact)
        assert fastest <= last * AS_FAST  # of those that are as fast the simplest is taken
        last = fastest


def test_shares_sum_to_the_batch_whatever_the_machines() -> None:
    dice = random.Random(3)
    for _ in range(20):
        names = [dice.choice(("rtx4090", "rtx3060", "rtx4070", "rtx3090", "t4")) for _ in range(dice.randint(1, 5))]
        batch = dice.choice((6, 12, 20, 24, 32, 48))
        job = query("meta-llama/Llama-3.2-1B", method="lora", batch=batch, sequence_length=512)
        for candidate in decide(job, world(",".join(names))).by_kind:
            assert sum(candidate.work_split) * candidate.training.micro_batch == batch


def test_a_rank_without_known_speed_leaves_time_open_and_shares_equal() -> None:
    job = dataclasses.replace(query(), compute=lambda _placement, _training: None)
    candidate = option_of(job, world(), PlannedStrategy(kind="ddp", world_size=3), job.training)
    assert candidate.time is None
    assert candidate.shares == (8, 8, 8)
    choice = decide(job, world())
    assert "step time is unknown" in "\n".join(report(choice, Length(None)))


def test_the_users_own_shares_are_kept() -> None:
    machines = world()
    weighted = dataclasses.replace(
        machines,
        placements=tuple(
            dataclasses.replace(placement, weight=weight)
            for placement, weight in zip(machines.placements, (3, 2, 1), strict=True)
        ),
    )
    candidate = option_of(query(), weighted, PlannedStrategy(kind="ddp", world_size=3), query().training)
    assert candidate.shares == (12, 8, 4)


def speeds(**by_host: float) -> Compute:
    """Machines of which one computes so many micro-batches of one sample in a second."""
    length = query().tokens_per_sample
    return lambda placement, _: ComputeModel(
        per_token_s=1 / (by_host[placement.host] * length), source="measured", spread=0.03
    )


def about(batch: int, *, leave_open: bool = False) -> PlanQuery:
    """A job for pc1, pc2 and pc3 with speeds of 1, 0.55 and 0.45."""
    job = query(batch=batch, method="lora", leave_open=leave_open)
    return dataclasses.replace(job, compute=speeds(pc1=1, pc2=0.55, pc3=0.45), open=("batch", *job.open))


BIG = with_memory(world(), 80, 80, 80)


def test_a_batch_near_the_wish_is_chosen_that_the_machines_divide_well() -> None:
    choice = decide(about(32), BIG)
    assert choice.best is not None
    assert (choice.best.strategy.kind, choice.best.shares) == ("ddp", (20, 11, 9))
    assert (choice.query.batch, choice.query.about, choice.query.open) == (40, 32, ())
    text = " ".join("\n".join(report(choice, Length(None), width=400)).split())
    assert "divides batch 40, about 32 as the job says: shares 20/11/9 reach 100 % of an exact division" in text
    assert "32 would reach 97.8 %" in text
    told = choice_json(choice, [])["batch"]
    assert (told["batch"], told["about"], round(told["ceiling"], 6)) == (40, 32, 1.0)


def test_an_exact_batch_is_never_changed_and_said_to_divide_badly() -> None:
    choice = decide(dataclasses.replace(about(24), open=()), BIG)
    assert (choice.query.batch, choice.query.about) == (24, None)
    assert "divides    badly: batch 24 reaches 94.3 %" in "\n".join(report(choice, Length(None), width=400))
    good = decide(dataclasses.replace(about(40), open=()), BIG)
    assert not any(line.startswith("divides") for line in report(good, Length(None)))
    assert round(choice_json(good, [])["batch"]["ceiling"], 6) == 1.0


def test_all_numbers_of_machines_are_weighed_with_the_batch_that_was_chosen() -> None:
    choice = decide(about(32), BIG)
    options = [candidate for few in choice.by_hosts if (candidate := few.runnable) is not None]
    assert [sum(candidate.shares) * candidate.training.micro_batch for candidate in options] == [40, 40, 40]


def test_micro_batch_and_batch_are_chosen_together() -> None:
    floor = dataclasses.replace(about(32, leave_open=True), compute=_with_floor)
    choice = decide(floor, BIG)
    assert choice.best is not None
    micro_batch, batch = choice.best.training.micro_batch, choice.query.batch
    assert micro_batch > 1
    assert batch % micro_batch == 0
    assert 24 <= batch <= 42
    taken = batch / choice.best.seconds
    for size in (1, 2, 3, 4, 8):
        training = dataclasses.replace(floor.training, micro_batch=size)
        for other in (each for each in range(24, 43) if each % size == 0):
            exact = dataclasses.replace(floor, batch=other, training=training, open=())
            candidate = option_of(exact, BIG, PlannedStrategy(kind="ddp", world_size=3), training)
            assert other / candidate.seconds <= taken * 1.04  # 2 % for the simpler one, 1 % for the nearer batch


def _with_floor(placement: Placement, _: Training) -> ComputeModel:
    """Two samples at once take no longer than one."""
    speed = {"pc1": 1.0, "pc2": 0.55, "pc3": 0.45}[placement.host]
    per_token_s = 1 / (speed * query().tokens_per_sample)
    return ComputeModel(per_token_s=per_token_s, floor_s=2 / speed, source="measured", spread=0.03)


def test_where_no_speed_is_known_or_has_a_say_the_batch_is_the_wish() -> None:
    blind = dataclasses.replace(about(32), compute=lambda _placement, _training: None)
    assert decide(blind, BIG).query.batch == 32
    placements = [dataclasses.replace(placement, weight=1.0) for placement in BIG.placements]
    choice = decide(about(32), dataclasses.replace(BIG, placements=tuple(placements)))
    assert choice.query.batch == 32
    assert "speeds are unknown" in "\n".join(report(choice, Length(None), width=400))
    in_fours = dataclasses.replace(blind, batch=30, training=dataclasses.replace(blind.training, micro_batch=4))
    assert decide(in_fours, BIG).query.batch == 28


def test_where_no_speed_is_known_micro_batches_are_as_small_as_the_shares_of_the_file_want() -> None:
    blind = dataclasses.replace(query(batch=12, leave_open=True), compute=lambda _placement, _training: None)
    weights = zip(BIG.placements, (3.0, 2.0, 1.0), strict=True)
    weighted = tuple(dataclasses.replace(placement, weight=weight) for placement, weight in weights)
    chosen = decide(blind, dataclasses.replace(BIG, placements=weighted)).best
    assert chosen is not None
    assert [share * chosen.training.micro_batch for share in chosen.shares] == [6, 4, 2]
    even = decide(blind, BIG).best
    assert even is not None
    assert (even.training.micro_batch, even.shares) == (4, (1, 1, 1))


def test_where_nothing_fits_the_batch_is_the_wish_in_whole_micro_batches() -> None:
    job = query("meta-llama/Llama-2-70b-hf", batch=30, method="full", micro_batch=4, leave_open=False)
    choice = decide(dataclasses.replace(job, open=("batch",)), world())
    assert choice.best is None
    assert choice.dividing is None
    assert choice.query.batch == 28
    assert choice_json(choice, [])["batch"] is None


def test_ranks_with_equal_shares_get_a_batch_that_has_as_many_for_each() -> None:
    job = query("zai-org/GLM-4.5-Air", batch=60, method="lora", leave_open=False, checkpointing=True)
    job = dataclasses.replace(job, open=("batch",), strategy=StrategyJob(kind="fsdp"))
    choice = decide(job, world("8xa100-80gb,8xa100-80gb", wire="hdr", inside="nvlink-a100"))
    assert choice.best is not None
    assert choice.best.strategy.half.lockstep
    assert choice.query.batch == 64
    assert set(choice.best.shares) == {4}


@pytest.mark.parametrize("gib", [3, 6, 10, 80])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_of_every_strategy_the_best_of_all_its_ways_is_shown(method: str, gib: int) -> None:
    job = query("meta-llama/Llama-3.2-1B", method=method, batch=24, sequence_length=512)
    machines = with_memory(world("rtx4090,rtx4090,rtx3060"), gib, gib, gib)
    for shown in options_of(job, machines):
        if shown.strategy.kind == "pipeline":  # each way has stages of its own
            continue
        others = [option_of(job, machines, shown.strategy, training) for training in decision.trainings(job)]
        if shown.scenario.settings:  # each rank has settings of its own: see test_rank_settings.py
            assert shown.fits
            assert shown.seconds < min(each.seconds for each in others if each.fits)
            continue
        assert shown in others
        fitting = [each for each in others if each.fits] or [each for each in others if each.may_fit]
        if fitting:
            assert shown in fitting
            assert shown.seconds <= 1.02 * min(each.seconds for each in fitting)
        else:
            assert shown.chance == max(each.chance for each in others)


@pytest.mark.parametrize(("hosts", "most"), [(EIGHT, 2600), (",".join(f"8x{card}" for card in EIGHT.split(",")), 5500)])
def test_memory_is_reckoned_once_for_ranks_that_do_the_same(
    hosts: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/plan_speed.py measures the time: this is most of it."""
    asked = []
    monkeypatch.setattr(memory_fit, "rank_memory", lambda *ask, **more: asked.append(more) or rank_memory(*ask, **more))
    decide(query("meta-llama/Llama-3.1-8B", method="lora", batch=240), world(hosts, wire="10gbit"))
    assert 100 < len(asked) < most


def test_gradients_are_rounded_only_where_that_is_asked_for_and_pays() -> None:
    job = query(method="lora", targets=("all-linear",), sequence_length=512, batch=12, leave_open=False)
    job = dataclasses.replace(job, strategy=StrategyJob(kind="ddp"))
    slow, fast = (with_memory(world(wire=wire), 24, 24, 24) for wire in ("100mbit", "10gbe"))
    asked = decide(job, slow)
    assert asked.runnable is not None
    assert asked.runnable.narrow_s is not None
    assert asked.runnable.narrow_s < 0.9 * asked.runnable.seconds
    lines = " ".join(" ".join(report(asked, Length(None), width=400)).split())
    assert "exchange: bf16 would take" in lines
    auto = dataclasses.replace(job, open=("exchange",))
    chosen = decide(auto, slow).runnable
    assert chosen is not None
    assert chosen.training.exchange == "bf16"
    assert chosen.seconds == pytest.approx(asked.runnable.narrow_s, rel=1e-6)
    assert 2 * chosen.traffic.sent_bytes == asked.runnable.traffic.sent_bytes
    assert "gradients travel in bf16" in " ".join(report(decide(auto, slow), Length(None), width=400))
    quick = decide(auto, fast)
    assert quick.runnable is not None
    assert quick.runnable.training.exchange is None
    assert "bf16 would take" not in " ".join(report(quick, Length(None), width=400))


def test_numbers_that_are_no_wider_are_not_rounded() -> None:
    job = query(method="lora", parameters="bf16", targets=("all-linear",), sequence_length=512, leave_open=False)
    choice = decide(dataclasses.replace(job, open=("exchange",)), with_memory(world(wire="100mbit"), 24, 24, 24))
    assert choice.runnable is not None
    assert choice.runnable.narrow_s is None
    assert choice.runnable.training.exchange is None


def test_one_rank_has_nothing_to_send_in_bf16() -> None:
    job = query(method="lora", sequence_length=512, exchange="bf16", leave_open=False)
    lines = " ".join(report(decide(job, with_memory(world("rtx4090"), 24)), Length(None), width=400))
    assert "exchange: bf16 does nothing" in lines


def test_deepspeed_is_never_taken_unasked_and_taken_where_the_job_asks_for_it() -> None:
    eight = with_memory(world(",".join(["4xa100-80gb"] * 2), wire="hdr"), *[80.0] * 8)
    job = query(method="full", batch=64, sequence_length=512)
    unasked = decide(job, eight)
    assert unasked.best == unasked.runnable
    assert unasked.best is not None
    assert not unasked.best.strategy.kind.startswith("zero")
    for asked in ("zero-1", "zero-2", "zero-3"):
        given = decide(dataclasses.replace(job, strategy=StrategyJob(kind=asked)), eight)  # type: ignore[arg-type]
        assert given.runnable is not None
        assert given.runnable.strategy.kind == asked


def test_states_in_the_machines_memory_leave_the_card() -> None:
    cards = with_memory(world("a100-80gb,a100-80gb", wire="hdr"), 80, 80)
    need = {}
    for offload in ((), ("optimizer",), ("optimizer", "parameters")):
        asked = StrategyJob(kind="zero-3", offload=offload)  # type: ignore[arg-type]
        job = dataclasses.replace(query(method="full", batch=8, sequence_length=512, leave_open=False), strategy=asked)
        candidate = decide(job, cards).by_kind[0]
        need[len(offload)] = candidate.tightest.memory.persistent_bytes
        assert candidate.strategy.offload == offload
    weights = job.architecture.num_parameters
    assert need[0] - need[1] == pytest.approx(12 * weights / 2, rel=1e-6)  # fp32 weights and two moments, by halves
    assert need[1] - need[2] == pytest.approx(2 * weights / 2, rel=1e-6)


def test_states_on_a_disk_leave_the_machines_memory_but_for_a_group_of_them() -> None:
    job = query(method="full", batch=8, sequence_length=512, leave_open=False)
    asked = StrategyJob(kind="zero-3", offload=("optimizer",), offload_to="/scratch")
    choice = decide(dataclasses.replace(job, strategy=asked), world("a100-80gb,a100-80gb", wire="hdr"))
    way = choice.by_kind[0].strategy
    in_memory, on_disk = (
        rank_memory(job.architecture, job.training, dataclasses.replace(way, on_disk=each), device=CPU)
        for each in (False, True)
    )
    numbers = job.architecture.num_parameters // 2
    assert (in_memory.disk_bytes, on_disk.disk_bytes) == (0, 16 * numbers)
    freed = in_memory.persistent_bytes - on_disk.persistent_bytes
    assert freed == pytest.approx(12 * numbers - 16 * 100_000_000, rel=1e-6)
    lines = "\n".join(report(choice, Length(known=None)))
    assert "zero-3, optimizer on disk" in lines
    assert "50.2 GiB of each rank are written and read in every step" in lines


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_parts_in_the_machines_memory_leave_the_card_and_pass_the_bus(kind: str) -> None:
    """All state of a rank: weights, gradients and two moments in fp32. Adapters and their states stay."""
    cards = with_memory(world("2xa100-80gb,2xa100-80gb", wire="hdr"), 80, 80, 80, 80)
    both: tuple[Literal["optimizer", "parameters"], ...] = ("optimizer", "parameters")
    for method, offload in (("full", both), ("lora", both[1:])):
        job = query(method=method, batch=8, sequence_length=512, leave_open=False, accumulation=2)
        found = []
        for each in ((), offload):
            asked = dataclasses.replace(job, strategy=StrategyJob(kind=kind, offload=each))  # type: ignore[arg-type]
            (candidate,) = [each for each in decide(asked, cards).by_kind if each.strategy.kind == kind]
            found.append(candidate)
        plain, moved = (candidate.tightest.memory for candidate in found)
        weights, parts = job.architecture.num_parameters, 4 if kind == "fsdp" else 2
        state = (16 if method == "full" else 2) * weights / parts
        assert (plain.offloaded_bytes, moved.offloaded_bytes) == (0, pytest.approx(state, rel=1e-6))
        assert plain.persistent_bytes - moved.persistent_bytes == moved.offloaded_bytes
        assert moved.allocated_bytes < plain.allocated_bytes
        assert found[1].time is not None
        assert found[0].time is not None
        assert found[1].time.communication_s > found[0].time.communication_s
        assert "parameters in RAM" in reports.name(found[1].strategy)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"method": "qlora"}, "zero-3 with method: qlora"),
        ({"method": "lora", "compute": "fp16"}, "zero-3 with precision: fp16"),
        ({"method": "full", "parameters": "bf16"}, "zero-3 with precision.parameters: compute"),
    ],
)
def test_what_deepspeed_does_not_do_is_not_planned(words: dict[str, str], said: str) -> None:
    job = query(**words)  # type: ignore[arg-type]
    way = PlannedStrategy(kind="zero-3", world_size=2, shard_size=2, asked=True)
    missing = lacking(way, job.training, job.architecture)
    assert missing is not None
    assert missing.what == said


def test_cards_that_cannot_train_are_marked_on_the_screen_and_in_the_data() -> None:
    choice = decide(query(), world("pc1=rtx4090,pc2=7900xtx"))
    lines = " ".join("\n".join(report(choice, Length(None), width=400)).split())
    assert "planned only: gangline train cannot use the Radeon RX 7900 XTX of pc2 yet" in lines
    ranks = choice_json(choice, [])["strategies"][0]["ranks"]
    untrained = {rank["host"]: rank["untrained"] for rank in ranks}
    assert untrained["pc1"] is None
    assert "AMD" in untrained["pc2"]


def test_a_card_in_no_list_is_answered_with_where_its_figures_go() -> None:
    (placement,) = world("pc1=rtx4090").placements
    unknown = dataclasses.replace(placement, gpu="NVIDIA Prototype 1", spec=None)
    choice = decide(query(), dataclasses.replace(world("pc1=rtx4090"), placements=(unknown,)))
    lines = " ".join("\n".join(report(choice, Length(None), width=400)).split())
    assert "no list has the Prototype 1 of pc1" in lines
    assert "bandwidth_gbs" in lines


def test_a_machine_whose_cards_have_its_own_memory_moves_nothing_there() -> None:
    job = query("meta-llama/Llama-2-7b-hf", method="qlora", sequence_length=16384, leave_open=False)
    job = dataclasses.replace(job, training=dataclasses.replace(job.training, checkpointing=True))
    assert "offload" in "\n".join(ways_lines(ways_out(job, with_memory(world("rtx4090,rtx4090"), 11, 11))))
    assert "offload" not in "\n".join(ways_lines(ways_out(job, with_memory(world("gb10,gb10"), 11, 11))))
