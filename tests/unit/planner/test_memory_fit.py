"""Who has room: what is reckoned once for many ranks is what each of them would have told."""

from __future__ import annotations

import dataclasses
import random

import pytest

from gangline.planner.machines import Placement, imagine
from gangline.planner.memory import CPU, CUDA, HOPPER, rank_memory
from gangline.planner.memory_fit import MemoryFit, device_of
from gangline.planner.training import PlannedStrategy, Training
from gangline.strategies.pipeline.plan import cut_layers, most_that, pipeline
from tests.unit.planner.worlds import model

MODELS = ("meta-llama/Llama-3.2-1B", "zai-org/GLM-4.5-Air", "Qwen/Qwen2.5-0.5B")
WAYS = (
    PlannedStrategy(kind="ddp", world_size=8),
    PlannedStrategy(kind="zero-2", world_size=8, shard_size=8),
    PlannedStrategy(kind="zero-3", world_size=8, shard_size=8),
    PlannedStrategy(kind="fsdp", world_size=8, shard_size=8, reshard=False),
    PlannedStrategy(kind="hsdp", world_size=8, shard_size=4),
    PlannedStrategy(kind="local-sgd", world_size=8, inner_steps=50),
    pipeline((3, 3, 3, 3, 1, 1, 1, 1)),
    pipeline((5, 5, 3, 3, 4, 4, 7, 1), replicas=2),
)


def training(**more: object) -> Training:
    base = Training(method="lora", micro_batch=2, sequence_length=1024, targets=("all-linear",))
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def placements(dice: random.Random) -> tuple[Placement, ...]:
    """Eight of two kinds, each with some of its memory taken; of some nobody knows how much."""
    found = imagine("4xrtx4090,4xrtx3060")
    free = [None if dice.random() < 0.2 else dice.randrange(4 << 30, 24 << 30) for _ in found]
    return tuple(dataclasses.replace(placement, free_bytes=each) for placement, each in zip(found, free, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_larger_micro_batch_never_needs_less(name: str, method: str) -> None:
    """That is why larger ones are not tried where a smaller one does not fit."""
    for strategy in WAYS:
        if sum(strategy.stages) > model(name).num_layers * strategy.replicas:
            continue
        for checkpointing in (False, True):
            last = 0
            for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
                ask = training(method=method, micro_batch=size, checkpointing=checkpointing, accumulation=2)
                needed = rank_memory(model(name), ask, strategy, device=CUDA).process.likely
                assert needed >= last
                last = needed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_of_stages_that_are_alike_the_one_nearer_to_the_front_needs_more(name: str, checkpointing: bool) -> None:
    """That is why the first of them tells whether all have room."""
    for method in ("full", "lora", "qlora"):
        ask = training(method=method, checkpointing=checkpointing, accumulation=2)
        stages = pipeline((2,) * 8)
        needed = [rank_memory(model(name), ask, stages, rank=rank, device=CUDA).process.likely for rank in range(1, 7)]
        assert needed == sorted(needed, reverse=True)
        assert needed[0] > needed[-1]


@pytest.mark.parametrize("seed", range(6))
def test_the_tightest_ranks_tell_what_all_would_have_told(seed: int) -> None:
    dice = random.Random(seed)
    room = MemoryFit(
        architecture=model(dice.choice(MODELS[:2])), training=training(accumulation=2), placements=placements(dice)
    )
    for strategy in WAYS:
        needs = room.needs(strategy)
        known = [need.chance for need in needs if need.chance is not None]
        tightest = min((1.0 if need.chance is None else need.chance, -need.shortage_bytes) for need in needs)
        assert room.nearness(strategy) == tightest
        assert room.nearness(strategy)[0] == min(known)
        for rank, need in enumerate(needs):
            alone = rank_memory(room.architecture, room.training, strategy, rank=rank, device=CUDA)
            assert need.memory == alone


@pytest.mark.parametrize("seed", range(4))
def test_stages_are_within_memory_where_any_are(seed: int) -> None:
    dice = random.Random(seed)
    room = MemoryFit(
        architecture=model("meta-llama/Llama-3.2-1B"), training=training(micro_batch=4), placements=placements(dice)
    )
    found = cut_layers(room, [dice.uniform(0.5, 2.0) for _ in room.placements])
    assert found is not None
    assert sum(found) == 16
    assert min(found) >= 1
    others = [dice.sample(range(1, 16), 7) for _ in range(200)]
    splits = [tuple(b - a for a, b in zip((0, *cut), (*cut, 16), strict=True)) for cut in map(sorted, others)]
    best = max(room.nearness(pipeline(split))[0] for split in splits)
    assert room.nearness(pipeline(found))[0] >= 0.5 or best < 0.9


def test_every_pipeline_is_cut_by_its_own_machines() -> None:
    architecture, ask = model("meta-llama/Llama-3.2-1B"), training(micro_batch=4)
    machines = imagine("rtx4090,rtx3060,rtx3060,rtx3060")
    room = MemoryFit(architecture=architecture, training=ask, placements=machines)
    one = MemoryFit(architecture=architecture, training=ask, placements=machines[:2])
    unlike, alike = cut_layers(one, (1.0, 3.0)), (8, 8)
    assert cut_layers(room, (1.0, 3.0, 3.0, 3.0), replicas=2) == (*(unlike or ()), *alike)
    assert cut_layers(room, (1.0,) * 4) == (4, 4, 4, 4)


@pytest.mark.parametrize("capability", ["", "7.5", "8.9", "9.0", "10.3", "11.0", "12.1"])
def test_products_take_larger_workspaces_from_capability_9_on(capability: str) -> None:
    (placement,) = imagine("rtx4090")
    assert placement.spec is not None
    card = dataclasses.replace(placement, spec=dataclasses.replace(placement.spec, compute_capability=capability))
    assert device_of(card) is (HOPPER if capability in {"9.0", "10.3", "11.0", "12.1"} else CUDA)
    assert device_of(dataclasses.replace(card, gpu=None, spec=None)) is CPU


@pytest.mark.parametrize("high", [0, 1, 7, 40])
def test_the_largest_that_holds_is_found_from_wherever_one_begins(high: int) -> None:
    for most in range(high + 1):
        for near in range(-1, high + 3):
            assert most_that(lambda each, most=most: each <= most, high, near=near) == most
