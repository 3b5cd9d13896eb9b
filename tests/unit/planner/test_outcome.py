"""A plan beside what came of it: like with like, of calm steps only, and what the next plan learns from it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from gangline.planner.outcome import Comparison, fold, observe
from gangline.planner.plan import Plan
from tests.unit.planner.outcomes import GIB, evaluation, line, outcome, plan, profile

RUN = [line(step) for step in range(1, 21)]


def kept(made: Plan, records: list[dict[str, Any]], **how: Any) -> Comparison:
    comparison = outcome(made, records, **how)
    assert comparison is not None
    return comparison


def test_what_was_planned_stands_beside_what_was_measured() -> None:
    comparison = kept(plan(), RUN)
    assert (comparison.run, comparison.attempt, comparison.num_steps) == ("calm-otter-7", 1, 18)
    assert (comparison.step_s.planned, comparison.step_s.measured) == (0.72, 0.8)
    assert (comparison.exposed_s.planned, comparison.exposed_s.measured) == (0.1, pytest.approx(0.1))
    assert [(rank.compute_s.planned, rank.compute_s.measured) for rank in comparison.ranks] == [(0.6, 0.6), (0.5, 0.5)]


def test_of_the_faster_rank_the_wait_for_the_slower_was_planned_too() -> None:
    waits = [rank.wait_s for rank in kept(plan(), RUN).ranks]
    assert [(wait.planned, wait.measured) for wait in waits] == [pytest.approx((0.1, 0.1)), pytest.approx((0.2, 0.2))]


def test_tensors_of_a_card_and_a_whole_process_are_kept_apart() -> None:
    card, processor = kept(plan(), RUN).ranks
    assert (card.allocated_bytes, card.resident_bytes) == (5 * GIB, None)
    assert (card.memory.planned, card.memory.error) == (5 * GIB, 0.0)
    assert (processor.allocated_bytes, processor.resident_bytes) == (None, 5 * GIB)
    assert processor.memory.planned == 3 * GIB


def test_one_line_says_it() -> None:
    line_of = kept(plan(), RUN).line
    assert line_of == "step 0.8 s, planned 0.72 s (-10 %); resident memory pc2 5 GiB, planned 3 GiB (-40 %)"


def test_a_step_that_nobody_expected_is_said_to_be_one() -> None:
    slow = kept(plan(), [line(step, step_s=1.44) for step in range(1, 21)])
    assert slow.line.startswith("step 1.44 s, planned 0.72 s (-50 %), outside of 0.6 s to 0.9 s; ")


def test_without_a_known_speed_seconds_and_memory_are_kept_all_the_same() -> None:
    comparison = kept(plan(timed=False), RUN)
    assert (comparison.step_s.planned, comparison.step_s.measured, comparison.step_s.error) == (None, 0.8, None)
    assert [rank.compute_s.measured for rank in comparison.ranks] == [0.6, 0.5]
    assert comparison.line.startswith("step 0.8 s, with no speed known to plan with; resident memory pc2 5 GiB")


def test_a_round_is_compared_step_by_step() -> None:
    rounds = [line(step, round_steps=4, samples=32, tokens=3200, shares=(24, 8)) for step in range(4, 60, 4)]
    found = observe(rounds, attempt=1, batch=8, num_ranks=2)
    assert [step.number for step in found.steps] == list(range(8, 60, 4))
    assert {(step.step_s, step.tokens_per_sample, step.micro_batches) for step in found.steps} == {(0.8, 100.0, (6, 2))}
    short = line(62, round_steps=4, samples=20, tokens=2000)
    assert observe([*rounds, short], attempt=1, batch=8, num_ranks=2).steps == found.steps


def test_the_first_steps_of_an_attempt_do_not_count() -> None:
    slow_start = [line(1, step_s=60.0), line(2, step_s=30.0), *(line(step) for step in range(3, 8))]
    assert kept(plan(), slow_start).step_s.measured == 0.8
    assert kept(plan(), slow_start).num_steps == 5
    assert outcome(plan(), slow_start[:-1]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"samples": 3, "tokens": 300},  # the short end of an epoch
        {"skipped": True},
        {"attempt": 2},
        {"step_s": "nan"},
        {"ranks": []},
        {"ranks": None},
        {"ranks": [{"rank": 0}, {"rank": 1}]},
        {"tokens": True},
        {"time": None},
        {"step": "3\x1b[2J"},
        {"kind": "event"},
        {"step_s": 10**400},
    ],
)
def test_steps_that_say_nothing_of_the_pace_do_not_count(other: dict[str, Any]) -> None:
    records = [{**line(step, step_s=9.0), **other} if step % 2 else line(step) for step in range(1, 21)]
    assert kept(plan(), records).num_steps in {8, 9, 10}
    assert kept(plan(), records).step_s.measured == 0.8


def test_steps_after_an_evaluation_or_a_save_do_not_count() -> None:
    records = []
    for step in range(1, 25):
        disturbed = step % 4 == 1 or step % 3 == 1
        records.append(line(step, step_s=9.0 if disturbed else 0.8))
        records += [evaluation(step)] if step % 4 == 0 else []
    comparison = kept(plan(checkpoint_every_steps=3), records)
    assert comparison.num_steps == sum(1 for step in range(3, 25) if step % 4 != 1 and step % 3 != 1)
    assert comparison.step_s.measured == 0.8


def test_where_every_step_is_saved_all_count() -> None:
    assert kept(plan(checkpoint_every_steps=1), RUN).num_steps == 18


def test_without_a_forecast_there_is_nothing_to_compare() -> None:
    assert outcome(plan(forecast=None), RUN) is None


def test_a_forecast_of_other_ranks_is_refused() -> None:
    made = plan()
    with pytest.raises(ValueError, match="a forecast for 2 ranks in a plan for 1"):
        outcome(dataclasses.replace(made, ranks=made.ranks[:1]), [line(n, compute=(0.6,)) for n in range(1, 9)])  # type: ignore[arg-type]


def test_a_comparison_survives_its_file() -> None:
    comparison = kept(plan(profiles=("cafe-pc1", None)), RUN)
    assert Comparison.from_json(json.loads(json.dumps(comparison.to_json()))) == comparison


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("attempt",), "1/../.."),
        (("attempt",), True),
        (("ranks",), []),
        (("ranks",), 7),
        (("ranks", 0, "host"), 7),
        (("ranks", 0, "profile"), {}),
        (("ranks", 0, "compute_s"), 3),
        (("ranks", 0, "compute_s", "measured"), "nan"),
        (("ranks", 0, "compute_s", "measured"), -1.0),
        (("ranks", 0, "wait_s", "planned"), float("inf")),
        (("step_s", "measured"), 10**400),
        (("unheard",), 1),
    ],
)
def test_what_is_no_comparison_is_refused(path: tuple[Any, ...], value: Any) -> None:
    data = json.loads(json.dumps(kept(plan(), RUN).to_json()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        Comparison.from_json(data)


def slow_by(factor: float, *, profiles: tuple[str | None, str | None], run_id: str = "calm-otter-7") -> Comparison:
    """A run in which the six micro-batches of pc1 and the two of pc2 took so many times what a profile says."""
    records = [line(step, compute=(0.6 * factor, 0.2 * factor)) for step in range(1, 21)]
    return kept(plan(profiles=profiles), records, run_id=run_id)


def test_a_run_corrects_the_profile_that_its_plan_used() -> None:
    known = profile()
    folded = fold([known], [slow_by(1.25, profiles=(known.name, None))])
    assert folded.profiles[known.name].factor == pytest.approx(1.25)
    assert folded.profiles[known.name].corrected.micro_batch_s(100, 100) == pytest.approx(0.125)
    (words,) = folded.lines
    assert "calm-otter-7 took 1.25 x what was measured; plans now take 1.25 x" in words


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "zero-1", "zero-3", "tp"])
def test_what_was_computed_between_exchanges_is_no_sign_of_speed(strategy) -> None:
    known = profile()
    records = [line(step, compute=(0.5, 0.5)) for step in range(1, 21)]
    comparison = kept(plan(profiles=(known.name, None), strategy=strategy), records)
    assert fold([known], [comparison]).profiles[known.name] == known


def test_what_a_stage_of_a_pipeline_takes_is_no_sign_of_the_speed_of_all_layers() -> None:
    known = profile()
    records = [line(step, compute=(0.2, 0.1)) for step in range(1, 21)]
    comparison = kept(plan(profiles=(known.name, None), strategy="pipeline", stages=(9, 3)), records)
    assert [rank.profile for rank in comparison.ranks] == [None, None]
    assert fold([known], [comparison]).profiles[known.name] == known


def test_a_run_counts_once_however_many_ranks_it_has() -> None:
    known = profile()
    folded = fold([known], [slow_by(1.25, profiles=(known.name, known.name))])
    assert folded.profiles[known.name].num_runs == 1
    assert folded.profiles[known.name].factor == pytest.approx(1.25)


def test_two_runs_that_were_planned_alike_do_not_correct_twice() -> None:
    known = profile()
    runs = [slow_by(1.25, profiles=(known.name, None), run_id=name) for name in ("calm-otter-7", "wry-crane-1")]
    folded = fold([known], runs)
    assert folded.profiles[known.name].num_runs == 2
    assert folded.profiles[known.name].factor == pytest.approx(1.25)


def test_samples_that_were_shorter_than_planned_are_no_sign_of_speed() -> None:
    known = profile()
    records = [line(step, compute=(0.3, 0.1), tokens=400) for step in range(1, 21)]
    folded = fold([known], [kept(plan(profiles=(known.name, None)), records)])
    assert folded.profiles[known.name].factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    "profiles",
    [(None, None), ("another", None)],
)
def test_a_run_whose_speeds_were_estimates_teaches_no_profile(profiles: tuple[str | None, str | None]) -> None:
    known = profile()
    folded = fold([known], [slow_by(1.25, profiles=profiles)])
    assert (folded.profiles, folded.lines) == ({known.name: known}, ())


def test_a_run_from_before_the_measurement_does_not_correct_it() -> None:
    later = profile(measured="2026-11-22T08:00:00.000Z")
    assert fold([later], [slow_by(1.25, profiles=(later.name, None))]).profiles == {later.name: later}


def test_what_is_too_far_off_is_told_and_left_out() -> None:
    known = profile()
    folded = fold([known], [slow_by(40.0, profiles=(known.name, None))])
    assert folded.profiles == {known.name: known}
    (words,) = folded.lines
    assert "took 40.00 x what was measured, too far off to be the same work: left out" in words


def test_a_rank_without_work_says_nothing_of_its_speed() -> None:
    known = profile()
    made = plan(profiles=(None, known.name))
    idle = dataclasses.replace(made, ranks=(made.ranks[0], dataclasses.replace(made.ranks[1], share=0)))
    records = [line(step, shares=(8, 0)) for step in range(1, 21)]
    assert fold([known], [kept(idle, records)]).profiles == {known.name: known}


MOVED = [line(step) for step in range(1, 9)] + [line(step, compute=(0.5, 0.75), shares=(5, 3)) for step in range(9, 25)]


def test_where_shares_moved_as_many_micro_batches_were_planned_as_measured() -> None:
    """The plan foresaw 0.1 s for a micro-batch of pc1 and 0.25 s for one of pc2, and was right to the end."""
    comparison = kept(plan(), MOVED)
    assert [rank.micro_batches for rank in comparison.ranks] == [5, 3]
    compute = [(rank.compute_s.planned, rank.compute_s.measured) for rank in comparison.ranks]
    assert compute == [pytest.approx((0.5, 0.5)), pytest.approx((0.75, 0.75))]
    assert [rank.wait_s.planned for rank in comparison.ranks] == [pytest.approx(0.35), pytest.approx(0.1)]


def test_shares_that_moved_are_no_sign_of_another_speed() -> None:
    known = profile()
    folded = fold([known], [kept(plan(profiles=(known.name, None)), MOVED)])
    assert folded.profiles[known.name].factor == pytest.approx(1.0)


def test_a_machine_that_became_slow_and_was_dealt_less_is_known_to_be_slow() -> None:
    known = profile()
    records = [line(step, compute=(0.6, 0.9), shares=(3, 5)) for step in range(1, 21)]
    folded = fold([known], [kept(plan(profiles=(known.name, None)), records)])
    assert folded.profiles[known.name].factor == pytest.approx(2.0)
