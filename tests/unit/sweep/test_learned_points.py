"""Samplers and pruners of optuna: better points than drawn ones, bad trials dropped, nothing lost with a supervisor."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gangline.errors import RunFailed, UsageError
from gangline.runs.layout import SweepLayout
from gangline.runs.record_versions import write_record
from gangline.sweep.drive import Driver
from gangline.sweep.learned_points import LearnedPoints, corners, require_sampler
from gangline.sweep.points import Point, axes_of, draw_points
from gangline.sweep.records import SamplerRecord, SweepRecord, TrialRecord, create_trial, load_trials
from gangline.sweep.schedule import ranking
from tests.fakes.trial_runs import PlayedRuns, played_sweep, small_job

HAS_OPTUNA = importlib.util.find_spec("optuna") is not None
needs_optuna = pytest.mark.skipif(not HAS_OPTUNA, reason="optuna is not installed")
WORDS = ("rate=0..10", "scale=1e-4..1:log", "kind=a,b,c", "steps=100")
ABC = ("a", "b", "c")


def landscape(point: Mapping[str, str], step: int) -> float:
    """Lowest at rate 7, scale 0.01 and kind b; it falls with the steps."""
    floor = abs(float(point["rate"]) - 7) / 3 + abs(math.log10(float(point["scale"])) + 2) + (point["kind"] != "b")
    return floor + 4 * math.exp(-step / 30)


class Source:
    """See `PointSource`: a real study, whose points are those of computed runs."""

    def __init__(self, layout: SweepLayout, runs: PlayedRuns, num_trials: int) -> None:
        self.layout, self.runs, self.num_trials = layout, runs, num_trials
        self.points = LearnedPoints(SweepRecord.load(layout.request), load_trials(layout))

    def ask(self, trials: Sequence[TrialRecord]) -> TrialRecord | None:
        number = len(trials) + 1
        point = None if number > self.num_trials else self.points.ask(number, trials)
        if point is None:
            return None
        trial = TrialRecord(number=number, point=point, fits=ABC)
        self.runs.points[number] = point  # type: ignore[index]
        create_trial(self.layout, trial, small_job())
        return trial

    def take_in(self, trial: TrialRecord) -> bool:
        return self.points.take_in(trial)


def a_sweep(home: Path, *, pruner: str | None = None, seed: int = 0) -> SweepLayout:
    layout = played_sweep(home, [])
    sampler = SamplerRecord(sampler="tpe", num_trials=40, pruner=pruner, seed=seed, fits=ABC)
    dataclasses.replace(SweepRecord.load(layout.request), words=WORDS, sampler=sampler).save(layout.request)
    return layout


def driven(layout: SweepLayout, runs: PlayedRuns, num_trials: int = 40) -> list[TrialRecord]:
    runs.driver = Driver(layout, runs, source=Source(layout, runs, num_trials), clock=runs.clock, wait=runs.wait)
    runs.driver.run()
    return load_trials(layout)


def played() -> PlayedRuns:
    return PlayedRuns(points=dict[int, Point](), landscape=landscape, steps=100)


@needs_optuna
def test_trials_that_learn_find_a_better_point_than_as_many_that_are_drawn(tmp_path: Path) -> None:
    learned, drawn = [], []
    for seed in range(6):
        points = LearnedPoints(SweepRecord.load(a_sweep(tmp_path / str(seed), seed=seed).request), [])
        trials: list[TrialRecord] = []
        for number in range(1, 31):
            point = points.ask(number, trials)
            assert point is not None
            losses: dict[str, float | None] = {"100": landscape(point, 100)}
            trials.append(TrialRecord(number=number, point=point, fits=ABC, phase="finished", losses=losses))
            points.take_in(trials[-1])
        learned.append(ranking(trials)[0].loss or math.inf)
        drawn.append(min(landscape(point, 100) for point in draw_points(axes_of(WORDS), 30, seed=seed)))
        assert len({tuple(trial.point.values()) for trial in trials}) == 30
    assert sum(learned) < 0.8 * sum(drawn)


@needs_optuna
def test_points_keep_to_their_ranges_and_values(tmp_path: Path) -> None:
    for trial in driven(a_sweep(tmp_path), played(), 12):
        assert 0 <= int(trial.point["rate"]) <= 10
        assert 1e-4 <= float(trial.point["scale"]) <= 1
        assert trial.point["kind"] in ABC
        assert trial.point["steps"] == "100"


@needs_optuna
def test_a_pruner_drops_trials_that_fall_behind_and_saves_steps(tmp_path: Path) -> None:
    runs = played()
    trials = driven(a_sweep(tmp_path, pruner="halving"), runs)
    dropped = [trial for trial in trials if trial.phase == "dropped"]
    assert {trial.phase for trial in trials} == {"dropped", "finished"}
    assert len(dropped) >= 10
    assert all(trial.step < 100 for trial in dropped)
    assert runs.steps_done < 0.75 * 40 * 100
    assert [trial.phase for trial in ranking(trials)[: 40 - len(dropped)]] == ["finished"] * (40 - len(dropped))


@needs_optuna
def test_another_supervisor_goes_on_with_what_the_trials_before_reached(tmp_path: Path) -> None:
    layout, runs = a_sweep(tmp_path), played()
    wait = runs.wait

    def stops(seconds: float) -> None:
        wait(seconds)
        if runs.now > 300:
            write_record(layout.order, {"order": "stop"})

    runs.driver = Driver(layout, runs, source=Source(layout, runs, 12), clock=runs.clock, wait=stops)
    runs.driver.run()
    before = load_trials(layout)
    assert {trial.phase for trial in before} == {"finished", "waiting"}
    layout.order.unlink()
    trials = driven(layout, runs, 12)
    assert [trial.phase for trial in trials] == ["finished"] * 12
    assert [trial.point for trial in trials[: len(before)]] == [trial.point for trial in before]
    assert len({tuple(trial.point.values()) for trial in trials}) == 12


@needs_optuna
def test_where_all_values_were_tried_the_sweep_ends(tmp_path: Path) -> None:
    layout = a_sweep(tmp_path)
    dataclasses.replace(SweepRecord.load(layout.request), words=("kind=a,b", "rate=7", "scale=1")).save(layout.request)
    assert sorted(trial.point["kind"] for trial in driven(layout, played())) == ["a", "b"]


@needs_optuna
def test_a_failed_trial_teaches_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    runs = played()
    runs.fails = {2: RunFailed("out of memory")}
    trials = driven(a_sweep(tmp_path), runs, 6)
    assert [trial.phase for trial in trials] == ["finished", "failed", *["finished"] * 4]


def test_corners_are_the_ends_of_ranges_and_every_value() -> None:
    assert corners(axes_of(["rate=1e-5..1e-3:log", "rank=8,16,32", "steps=9"])) == [
        {"rate": "1e-05", "rank": "8", "steps": "9"},
        {"rate": "0.001", "rank": "32", "steps": "9"},
        {"rate": "1e-05", "rank": "16", "steps": "9"},
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampler": "best"}, r"--sampler 'best' is not known"),
        ({"pruner": "asha"}, r"--pruner 'asha' is not known"),
    ],
)
def test_unknown_samplers_and_pruners_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        require_sampler(dataclasses.replace(SamplerRecord(sampler="tpe", num_trials=2), **changes))  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"--sampler cmaes needs optuna and cmaes"):
        require_sampler(SamplerRecord(sampler="cmaes", num_trials=2))
    with pytest.raises(UsageError, match=r"needs optuna") as caught:
        require_sampler(SamplerRecord(sampler="tpe", num_trials=2))
    assert "gangline[optuna]" in caught.value.fix
