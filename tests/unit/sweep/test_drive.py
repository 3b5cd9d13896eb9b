"""A supervisor of a sweep with computed runs: all trials end, whatever happens to hosts, runs and itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from gangline.control.user_command import draft
from gangline.errors import RunFailed, UsageError
from gangline.runs.cluster import Cluster
from gangline.runs.record_versions import write_record
from gangline.sweep.points import axes_of, grid
from gangline.sweep.records import TrialRecord, create_trial, load_trials
from gangline.sweep.schedule import make_halving, ranking
from tests.fakes.trial_runs import PlayedRuns, drive_to_the_end, played_sweep, small_job

POINTS = grid(axes_of(["rate=1,2,3,4", "rank=8,16"]))


def landscape(point: Mapping[str, str], step: int) -> float:
    """Falls with the steps towards a floor that is lowest at rate 3 and rank 16."""
    floor = 0.3 * abs(float(point["rate"]) - 3) + 0.1 * abs(float(point["rank"]) - 16) / 8
    return 1.0 + floor + 4 * math.exp(-step / 30)


def played(**changes: object) -> PlayedRuns:
    points = dict(enumerate(POINTS, start=1))
    return PlayedRuns(points=points, landscape=landscape, steps=100, **changes)  # type: ignore[arg-type]


def test_all_points_run_one_per_host_and_the_ranking_is_that_of_one_after_the_other(tmp_path: Path) -> None:
    runs = played(step_s={"a": 1.0, "b": 2.0, "c": 3.0})
    trials = drive_to_the_end(played_sweep(tmp_path, POINTS), runs)
    assert {trial.phase for trial in trials} == {"finished"}
    assert runs.most_at_once == 3
    serial = sorted(POINTS, key=lambda point: landscape(point, 100))
    assert [trial.point for trial in ranking(trials)] == serial
    assert ranking(trials)[0].point == {"rate": "3", "rank": "16"}
    assert [trial.losses["100"] for trial in trials] == [landscape(point, 100) for point in POINTS]
    quickest = [host for _, host in runs.starts].count("a")
    assert quickest == 5  # of 8: the fastest takes the last one, too, which the others would end later


def test_a_slow_host_does_not_take_the_last_trial_if_a_fast_one_ends_it_sooner(tmp_path: Path) -> None:
    points = grid(axes_of(["rate=1,2,3,4,5", "rank=8,16"]))
    step_s = {"a": 1.0, "b": 1.0, "c": 3.0}
    runs = PlayedRuns(points=dict(enumerate(points, start=1)), landscape=landscape, steps=100, step_s=step_s)
    trials = drive_to_the_end(played_sweep(tmp_path, points), runs)
    assert {trial.phase for trial in trials} == {"finished"}
    assert [host for _, host in runs.starts].count("c") == 1
    assert runs.now < 560  # 5 trials of 100 s on the fast ones; the second one of the slow host would end after 600 s


def test_the_next_trial_is_prepared_on_a_host_that_is_about_to_be_free(tmp_path: Path) -> None:
    runs = played(step_s={"a": 2.0, "b": 2.0, "c": 2.0})
    trials = drive_to_the_end(played_sweep(tmp_path, POINTS), runs)
    assert sorted(runs.prepared) == [4, 5, 6, 7, 8]
    assert sorted(name for name, _ in runs.starts) == [str(trial.number) for trial in trials]


def test_at_once_limits_how_many_run(tmp_path: Path) -> None:
    runs = played()
    trials = drive_to_the_end(played_sweep(tmp_path, POINTS, at_once=2), runs)
    assert runs.most_at_once == 2
    assert all(trial.phase == "finished" for trial in trials)


def test_a_failed_trial_keeps_its_cause_and_the_others_go_on(tmp_path: Path) -> None:
    runs = played(fails={2: RunFailed("out of memory", seen="24 GiB", fix="a smaller micro_batch")})
    trials = drive_to_the_end(played_sweep(tmp_path, POINTS), runs)
    assert [trial.number for trial in trials if trial.phase == "failed"] == [2]
    assert trials[1].error is not None
    assert trials[1].error["what"] == "out of memory"
    assert sum(trial.phase == "finished" for trial in trials) == 7


def test_slots_that_another_run_holds_are_waited_for(tmp_path: Path) -> None:
    runs = played(taken={"a": 2, "b": 1, "c": 3})
    trials = drive_to_the_end(played_sweep(tmp_path, POINTS), runs)
    assert {trial.phase for trial in trials} == {"finished"}


def test_a_trial_of_a_host_that_dies_begins_anew_elsewhere_and_the_host_is_used_again(tmp_path: Path) -> None:
    points = grid(axes_of(["rate=1,2,3,4,5,6", "rank=8,16"]))
    runs = PlayedRuns(points=dict(enumerate(points, start=1)), landscape=landscape, steps=100)
    layout = played_sweep(tmp_path, points)

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        runs.dead = {"b"} if 50 < runs.now < 230 else set()

    trials = drive_to_the_end(layout, runs, wait=wait)
    assert {trial.phase for trial in trials} == {"finished"}
    (moved,) = [trial for trial in trials if len(trial.places) > 1]
    assert moved.places[0] == "b" != moved.places[-1]
    assert all(run.phase != "running" for run in runs.runs.values())  # that of before was ended once b was back
    assert all(not trial.given_up for trial in trials)
    assert [host for _, host in runs.starts].count("b") > 1
    assert moved.losses["100"] == landscape(moved.point, 100)


def test_a_trial_that_is_prepared_on_a_host_that_dies_starts_elsewhere(tmp_path: Path) -> None:
    runs = played()
    layout = played_sweep(tmp_path, POINTS[:4])

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        runs.dead = {"a"} if runs.now > 40 else set()  # the fourth is prepared there, as on the first that is known

    trials = drive_to_the_end(layout, runs, wait=wait)
    assert 4 in runs.prepared
    assert {trial.phase for trial in trials} == {"finished"}
    assert {trial.places[-1] for trial in trials} == {"b", "c"}


def test_ten_times_a_host_dies_and_all_24_points_are_tried_to_their_end(tmp_path: Path) -> None:
    points = grid(axes_of(["rate=1,2,3,4,5,6", "rank=4,8,16,32"]))
    runs = PlayedRuns(points=dict(enumerate(points, start=1)), landscape=landscape, steps=100)
    dice, back = Random(1), dict.fromkeys("abc", 0.0)
    deaths: list[str] = []

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        if len(deaths) < 10 and len(runs.dead) < 3 and dice.random() < 0.2:
            deaths.append(dice.choice(sorted({*"abc"} - runs.dead)))
            back[deaths[-1]] = runs.now + dice.choice([50, 300])  # shorter and longer than it is waited for
        runs.dead = {host for host, at in back.items() if at > runs.now}

    trials = drive_to_the_end(played_sweep(tmp_path, points), runs, wait=wait)
    assert len(deaths) == 10
    assert [trial.phase for trial in trials] == ["finished"] * 24
    assert [trial.losses["100"] for trial in trials] == [landscape(point, 100) for point in points]


def test_a_supervisor_that_was_killed_is_followed_by_another_that_starts_nothing_twice(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    runs = played()
    layout = played_sweep(tmp_path, POINTS)

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        if runs.now == 130:
            raise Killed

    try:
        drive_to_the_end(layout, runs, wait=wait)
    except Killed:
        assert {trial.phase for trial in load_trials(layout)} == {"finished", "running", "waiting"}
    trials = drive_to_the_end(layout, runs)
    assert {trial.phase for trial in trials} == {"finished"}
    assert sorted(name for name, _ in runs.starts) == [str(trial.number) for trial in trials]


def test_a_stop_saves_what_runs_and_a_later_supervisor_goes_on_from_there(tmp_path: Path) -> None:
    runs = played()
    layout = played_sweep(tmp_path, POINTS)

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        if runs.now == 150:
            write_record(layout.order, {"order": "stop"})

    stopped = drive_to_the_end(layout, runs, wait=wait)
    assert sorted(trial.phase for trial in stopped) == ["finished"] * 3 + ["waiting"] * 5
    assert all(run.phase != "running" for run in runs.runs.values())
    layout.order.unlink()
    trials = drive_to_the_end(layout, runs)
    assert {trial.phase for trial in trials} == {"finished"}
    assert runs.steps_done == 800  # no step was done twice


def test_a_run_that_a_killed_supervisor_had_just_resumed_is_taken_over_and_not_called_failed(tmp_path: Path) -> None:
    runs = played()
    layout = played_sweep(tmp_path, POINTS[:1])

    def stops(seconds: float) -> None:
        runs.wait(seconds)
        if runs.now == 50:
            write_record(layout.order, {"order": "stop"})

    drive_to_the_end(layout, runs, wait=stops)
    layout.order.unlink()
    resume, looks = runs.resume, []

    def resumed_meanwhile(run: str, cluster: Cluster, *, pause_at: int | None) -> None:
        resume(run, cluster, pause_at=pause_at)
        looks.append(run)
        raise UsageError(f"{run} is running")

    runs.resume = resumed_meanwhile  # type: ignore[method-assign]
    (trial,) = drive_to_the_end(layout, runs)
    assert (trial.phase, trial.error, len(looks)) == ("finished", None, 1)


@pytest.mark.parametrize(("flag", "steps_done"), [("--resume", 800), (None, 800 + 3 * 50)])
def test_a_command_goes_on_after_a_stop_only_with_its_flag_and_begins_again_without(
    tmp_path: Path, flag: str | None, steps_done: int
) -> None:
    runs = played()
    template = draft(("train.py", "{rate}", "{rank}"), folder=tmp_path, resume_flag=flag)
    layout = played_sweep(tmp_path, POINTS, template=template)

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        if runs.now == 150:
            write_record(layout.order, {"order": "stop"})

    drive_to_the_end(layout, runs, wait=wait)
    layout.order.unlink()
    trials = drive_to_the_end(layout, runs)
    assert {trial.phase for trial in trials} == {"finished"}
    assert runs.steps_done == pytest.approx(steps_done, abs=1)


def test_a_run_that_the_user_stops_is_left_alone(tmp_path: Path) -> None:
    runs = played()
    layout = played_sweep(tmp_path, POINTS)

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        if runs.now == 50:
            runs.end("played-run-1", now=False)

    drive_to_the_end(layout, runs, wait=wait)
    assert sorted(trial.phase for trial in load_trials(layout)) == ["finished"] * 7 + ["stopped"]


def test_points_that_are_added_while_it_runs_are_tried_too(tmp_path: Path) -> None:
    runs = played()
    layout = played_sweep(tmp_path, POINTS[:4])

    def wait(seconds: float) -> None:
        runs.wait(seconds)
        if runs.now == 50:
            create_trial(layout, TrialRecord(number=5, point=POINTS[4], fits=("a",)), small_job())

    drive_to_the_end(layout, runs, wait=wait)
    assert [trial.phase for trial in load_trials(layout)] == ["finished"] * 5


def test_halving_finds_the_best_of_a_planted_landscape_with_a_third_of_the_steps(tmp_path: Path) -> None:
    points = grid(axes_of(["rate=1,1.5,2,2.5,3,3.5,4,4.5,5", "rank=4,8,16"]))
    runs = PlayedRuns(points=dict(enumerate(points, start=1)), landscape=landscape, steps=270)
    halving = make_halving(num_points=27, steps=270)
    trials = drive_to_the_end(played_sweep(tmp_path, points, halving=halving), runs)
    best = ranking(trials)[0]
    assert best.phase == "finished"
    assert best.point == min(points, key=lambda point: landscape(point, 270)) == {"rate": "3", "rank": "16"}
    assert sorted({trial.phase for trial in trials}) == ["dropped", "finished"]
    assert [sum(trial.rung == rung for trial in trials) for rung in range(4)] == [18, 6, 2, 1]
    assert runs.steps_done <= 27 * 270 / 3


def test_halving_gives_the_same_on_unlike_hosts_and_trials_move_between_them(tmp_path: Path) -> None:
    halving = make_halving(num_points=8, steps=100, eta=2)
    results = []
    for folder, step_s in (("one", {}), ("other", {"a": 1.0, "b": 1.2, "c": 1.5})):
        runs = played(step_s=step_s)
        trials = drive_to_the_end(played_sweep(tmp_path / folder, POINTS, halving=halving), runs)
        results.append([(trial.number, trial.phase, trial.rung, trial.losses) for trial in trials])
    assert results[0] == results[1]
    assert any(len(set(trial.places)) > 1 for trial in trials)
