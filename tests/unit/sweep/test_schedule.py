"""Free hosts get waiting trials in order; at a rung the best go on, whoever came first."""

from __future__ import annotations

import dataclasses

import pytest

from gangline.errors import UsageError
from gangline.sweep.records import HalvingRecord, TrialRecord
from gangline.sweep.schedule import best_trial, make_halving, pause_of, placements, promote, ranking, worthwhile

ABC = ("a", "b", "c")


def trial(number: int, **changes: object) -> TrialRecord:
    return dataclasses.replace(TrialRecord(number=number, point={}, fits=ABC), **changes)  # type: ignore[arg-type]


def placed(trials: list[TrialRecord], free: list[str], room: int | None = None) -> dict[int, tuple[str, ...]]:
    found = placements(trials, hosts=ABC, free=free, room=room)
    return {each.number: hosts for each, hosts in found}


def test_each_free_host_gets_one_trial_in_order() -> None:
    trials = [trial(number) for number in (1, 2, 3)]
    assert placed(trials, ["b", "c"]) == {1: ("b",), 2: ("c",)}
    assert placed(trials, list(ABC), room=1) == {1: ("a",)}
    assert placed(trials, []) == {}


def test_a_trial_that_goes_on_prefers_the_host_with_its_checkpoint() -> None:
    trials = [trial(1), trial(2, rung=1, hosts=("c",))]
    assert placed(trials, ["a", "c"]) == {2: ("c",), 1: ("a",)}
    assert placed(trials, ["b"]) == {2: ("b",)}


def test_a_small_host_is_passed_over_by_a_large_trial() -> None:
    trials = [trial(1, fits=("b",)), trial(2)]
    assert placed(trials, ["a"]) == {2: ("a",)}
    assert placed(trials, ["a", "b"]) == {1: ("b",), 2: ("a",)}


def test_a_trial_that_needs_all_hosts_waits_for_them_and_is_not_overtaken() -> None:
    trials = [trial(1), trial(2, fits=()), trial(3)]
    assert placed(trials, list(ABC)) == {1: ("a",)}
    assert placed(trials[1:], ["b", "c"]) == {}
    assert placed(trials[1:], list(ABC)) == {2: ABC}


def test_a_host_is_worth_its_while_if_some_trial_ends_first_on_it() -> None:
    trial_s = {"a": 100.0, "b": 100.0, "c": 300.0}
    assert worthwhile(3, free_in_s=dict.fromkeys(ABC, 0.0), trial_s=trial_s) == {"a", "b"}
    assert worthwhile(7, free_in_s=dict.fromkeys(ABC, 0.0), trial_s=trial_s) == {"a", "b", "c"}
    assert worthwhile(1, free_in_s={"a": 250.0, "b": 250.0, "c": 0.0}, trial_s=trial_s) == {"c"}
    assert worthwhile(0, free_in_s={"c": 0.0}, trial_s=trial_s) == set()


def test_rungs_divide_the_steps_by_eta() -> None:
    assert make_halving(num_points=27, steps=270).rungs == (10, 30, 90, 270)
    assert make_halving(num_points=8, steps=100, eta=2).rungs == (13, 25, 50, 100)
    for points, steps in ((2, 100), (27, 3)):
        with pytest.raises(UsageError, match=r"--halving cannot divide"):
            make_halving(num_points=points, steps=steps)


HALVING = HalvingRecord(eta=2, rungs=(10, 20, 40))


def test_a_rung_is_judged_once_all_are_there_and_keeps_the_best() -> None:
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0}
    there = [trial(number, phase="paused", losses={"10": loss}) for number, loss in losses.items()]
    assert promote([*there, trial(5, phase="running")], HALVING) == {}
    assert promote([*there, trial(5, phase="failed")], HALVING) == {
        1: "dropped",
        2: "waiting",
        3: "dropped",
        4: "waiting",
    }


def test_a_higher_rung_is_not_judged_while_somebody_is_below() -> None:
    above = [trial(number, rung=1, phase="paused", losses={"10": 1.0, "20": float(number)}) for number in (1, 2)]
    below = [trial(3, phase="dropped", losses={"10": 9.0}), trial(4, phase="waiting")]
    assert promote([*above, *below], HALVING) == {}
    assert promote([*above, below[0]], HALVING) == {1: "waiting", 2: "dropped"}


def test_an_added_point_is_held_to_the_same_bar() -> None:
    before = [
        trial(1, rung=2, phase="finished", losses={"10": 1.0, "20": 1.0}),
        trial(2, rung=1, phase="dropped", losses={"10": 2.0, "20": 2.0}),
        trial(3, phase="dropped", losses={"10": 3.0}),
        trial(4, phase="dropped", losses={"10": 4.0}),
    ]
    assert promote([*before, trial(5, phase="paused", losses={"10": 5.0})], HALVING) == {5: "dropped"}
    assert promote([*before, trial(5, phase="paused", losses={"10": 0.5})], HALVING) == {5: "waiting"}


def test_a_pause_is_the_next_rung_and_the_last_one_is_none() -> None:
    assert [pause_of(trial(1, rung=rung), HALVING) for rung in (0, 1, 2)] == [10, 20, None]
    assert pause_of(trial(1), None) is None


def test_the_ranking_is_by_the_last_loss_with_failed_trials_at_the_end() -> None:
    trials = [
        trial(1, losses={"5": 1.0, "100": 3.0}, phase="finished", run="r1"),
        trial(2, losses={"100": 2.0}, phase="running", run="r2"),
        trial(3),
        trial(4, losses={"100": 0.5}, phase="failed", run="r4"),
        trial(5, losses={"100": None}, phase="finished", run="r5"),
    ]
    assert [each.number for each in ranking(trials)] == [2, 1, 3, 5, 4]
    best = best_trial(trials)
    assert best is not None
    assert best.number == 1  # the second has saved nothing for sure while it runs


def test_of_a_metric_whose_highest_value_is_the_best_the_highest_comes_first() -> None:
    trials = [trial(1, losses={"1": 0.5}), trial(2, losses={"1": 0.9}), trial(3, losses={"1": None}), trial(4)]
    assert [each.number for each in ranking(trials, highest=True)] == [2, 1, 3, 4]
    assert [each.number for each in ranking(trials)] == [1, 2, 3, 4]
