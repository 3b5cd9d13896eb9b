"""What checkpoints cost: bytes by what is trained, seconds by disk and strategy, and when that is worth a line."""

from __future__ import annotations

import dataclasses

import pytest

from gangline.planner.candidate import Candidate
from gangline.planner.decision import decide
from gangline.planner.report import Length, report
from gangline.planner.saves import DISK, Rate, Saving, save_cost
from gangline.planner.training import PlannedStrategy
from gangline.runs.checkpoints import minutes_between
from tests.unit.planner.worlds import option_of, query, with_memory, world

SLOW = Rate(low=1e6, likely=2e6, high=4e6, source="a stick")
MINUTES = Saving(every_minutes=10)


def candidate(kind: str, method: str = "lora", **words: object) -> Candidate:
    asked = query(method=method)
    machines = with_memory(world("a=2xa100-80gb,b=2xa100-80gb"), 1000, 1000, 1000, 1000)
    return option_of(asked, machines, PlannedStrategy(kind=kind, world_size=4, **words), asked.training)  # type: ignore[arg-type]


def test_adapters_and_their_states_are_saved_whole_on_every_host_where_all_have_them() -> None:
    cost = save_cost(candidate("ddp"), MINUTES)
    assert cost.num_bytes == 3 * 8_388_608 * 4
    assert cost.write_s == pytest.approx([cost.num_bytes / rate for rate in (2e9, 0.4e9, 0.1e9)])
    assert cost.every_s == 600


def test_moments_of_8_bits_are_saved_as_they_are_paged_or_not() -> None:
    for kind in ("adamw-8bit", "paged-adamw-8bit"):
        asked = query(method="lora", optimizer=kind)
        way = option_of(asked, world("a100-80gb"), PlannedStrategy(kind="single", world_size=1), asked.training)
        assert save_cost(way, MINUTES).num_bytes == round((4 + 2 + 2 * 4 / 256) * 8_388_608)


def test_left_to_us_the_minutes_follow_from_what_a_save_is_likely_to_cost() -> None:
    way = candidate("ddp")
    cost = save_cost(way, Saving(every_minutes="auto"))
    assert cost.minutes == minutes_between(cost.hold_s[1], cost.write_s[1])
    assert cost.every_s == pytest.approx(60 * cost.minutes)
    waits = save_cost(way, Saving(every_minutes="auto", waits=True))
    assert waits.minutes is not None
    assert waits.minutes > cost.minutes


def test_what_our_trainer_has_in_parts_comes_together_before_it_is_written() -> None:
    whole, inside, parts = (
        save_cost(candidate(kind, "full", shard_size=size), MINUTES)
        for kind, size in (("ddp", 1), ("hsdp", 2), ("fsdp", 4))
    )
    assert whole.num_bytes == inside.num_bytes == parts.num_bytes
    assert whole.hold_s[1] < inside.hold_s[1] < parts.hold_s[1]
    assert parts.hold_s[1] > 0.75 * parts.num_bytes / 12.5e9  # three quarters of it over 100 Gbit/s
    for kind in ("fsdp", "hsdp"):  # every rank has all adapters
        lora = save_cost(candidate(kind, shard_size=2 if kind == "hsdp" else 4), MINUTES)
        assert lora.hold_s == save_cost(candidate("ddp"), MINUTES).hold_s


def test_what_a_pipeline_trains_goes_from_each_rank_to_all_hosts_before_it_is_written() -> None:
    for method in ("lora", "full"):
        whole, parts = (
            save_cost(candidate("ddp", method), MINUTES),
            save_cost(candidate("pipeline", method, stages=(8,) * 4), MINUTES),
        )
        assert parts.num_bytes == whole.num_bytes
        assert parts.hold_s[1] - whole.hold_s[1] > parts.num_bytes / 12.5e9  # all of it over 100 Gbit/s


def test_hosts_that_each_have_whole_pipelines_have_nothing_to_send() -> None:
    inside = candidate("pipeline", "full", stages=(20, 12, 16, 16), replicas=2)
    across = candidate("pipeline", "full", stages=(8,) * 4)
    assert save_cost(inside, MINUTES).num_bytes == save_cost(across, MINUTES).num_bytes
    assert save_cost(inside, MINUTES).hold_s[1] < 0.5 * save_cost(across, MINUTES).hold_s[1]
    assert not save_cost(inside, BY_HOST).in_parts


BY_HOST = dataclasses.replace(MINUTES, by_host=True)


def test_by_host_nothing_passes_between_hosts_and_each_writes_its_part() -> None:
    fsdp, three = candidate("fsdp", "full", shard_size=4), candidate("pipeline", "full", stages=(10, 10, 10, 2))
    whole, parts, uneven = save_cost(fsdp, MINUTES), save_cost(fsdp, BY_HOST), save_cost(three, BY_HOST)
    assert parts.num_bytes == whole.num_bytes
    assert parts.in_parts
    assert parts.host_bytes == -(-whole.num_bytes // 2)
    assert parts.write_s[1] == pytest.approx(whole.write_s[1] / 2)
    assert parts.hold_s[1] == pytest.approx(parts.host_bytes / 8e9 + parts.host_bytes / 2 / 0.9e9)
    assert uneven.host_bytes == pytest.approx(whole.num_bytes * 20 / 32, abs=1)


@pytest.mark.parametrize(
    ("kind", "method", "size"),
    [("ddp", "full", 1), ("hsdp", "full", 2), ("fsdp", "lora", 4), ("hsdp", "lora", 2), ("zero-3", "full", 4)],
)
def test_by_host_is_whole_where_a_host_holds_all_of_it(kind: str, method: str, size: int) -> None:
    way = candidate(kind, method, shard_size=size)
    assert save_cost(way, BY_HOST) == save_cost(way, MINUTES)


def test_training_waits_for_a_copy_or_where_the_job_wants_it_for_the_disk() -> None:
    free, waits = (save_cost(candidate("ddp"), dataclasses.replace(MINUTES, waits=each)) for each in (False, True))
    assert free.hold_s[1] < waits.hold_s[1] == waits.write_s[1]
    assert waits.share == pytest.approx(waits.write_s[1] / (600 + waits.write_s[1]))


def test_the_cadence_is_the_shorter_one_of_steps_and_minutes() -> None:
    way = candidate("ddp")
    assert way.time is not None
    for steps, minutes, seconds in ((2, None, 2 * way.seconds), (2, 10, min(600, 2 * way.seconds)), (None, None, None)):
        cost = save_cost(way, Saving(every_steps=steps, every_minutes=minutes))
        assert cost.every_s == (seconds if seconds is None else pytest.approx(seconds))
    assert save_cost(way, Saving()).share is None
    nobody_knows = dataclasses.replace(way.query, compute=lambda *_: None)
    unknown = option_of(nobody_knows, way.world, way.strategy, nobody_knows.training)
    assert save_cost(unknown, Saving(every_steps=2)).every_s is None


def saves(saving: Saving, *, why: bool = False) -> str:
    choice = decide(query(method="lora", sequence_length=512), with_memory(world(), 24, 24, 24))
    lines = report(choice, Length((100, "100 steps"), saving), why=why, width=400)
    begin = next(number for number, line in enumerate(lines) if line.startswith("saves"))
    end = next(number for number, line in enumerate(lines) if number > begin and line[0] != " ")
    return "\n".join(lines[begin:end])


def test_seconds_are_on_the_screen_where_they_matter_or_are_asked_for() -> None:
    quiet = saves(MINUTES)
    assert "96 MiB for a checkpoint" in quiet
    assert "to write each" not in quiet
    asked = saves(MINUTES, why=True)
    assert "252 ms to write each (50 ms to 1.0 s; a disk of 0.1 to 2 GB/s assumed)" in asked
    assert asked.endswith("0.0 % of the run")
    assert "less often" not in asked


def test_a_save_that_holds_the_run_up_is_told_unasked() -> None:
    text = saves(Saving(every_minutes=10, waits=True, disk=SLOW))
    assert "50.3 s to write each (25.2 s to 1 min 41 s; a stick), while training waits: 7.7 % of the run" in text


def test_a_disk_that_is_slower_than_the_cadence_is_told_unasked() -> None:
    assert "less often" in saves(Saving(every_minutes=1, disk=SLOW))
    assert "less often" not in saves(Saving(every_minutes=1, disk=DISK))
