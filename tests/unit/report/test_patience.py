"""A run whose supervisor is gone is followed on where another one is about to come, and is lost where none does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.report.follow import View, follow
from gangline.runs.state import ProcessId
from tests.unit.report.followed import Run, step


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.metrics(step(1))
    return run


def gone() -> ProcessId:
    me = ProcessId.current()
    return ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1)


def patient(run: Run) -> View:
    return dataclasses.replace(run.view, patience_s=75.0)


def test_it_is_followed_on_once_another_one_looks_after_it(run: Run) -> None:
    stages = [
        lambda: run.phase("running", gone()),
        lambda: run.metrics(step(2)),
        lambda: run.phase("running"),
        lambda: run.phase("finished"),
    ]
    updates = list(follow(patient(run), wait=lambda _seconds: stages.pop(0)(), clock=lambda: 0.0))
    assert [update.run.silent is not None for update in updates] == [False, True, True, False, False]
    assert [record["step"] for update in updates for record in update.records] == [1, 2]
    assert [update.last for update in updates] == [*[False] * 4, True]


def test_it_is_lost_if_nobody_comes(run: Run) -> None:
    run.phase("running", gone())
    times = iter((0.0, 40.0, 74.0, 75.0))
    updates = list(follow(patient(run), wait=lambda _seconds: None, clock=lambda: next(times)))
    assert [update.run.phase for update in updates] == ["running", "running", "running", "lost"]


def test_every_supervisor_that_goes_is_waited_for_anew(run: Run) -> None:
    times = iter((0.0, 70.0, 100.0, 170.0, 175.0))
    stages = [
        lambda: run.phase("running", gone()),
        lambda: None,
        lambda: run.phase("running"),
        lambda: run.phase("running", gone()),
        lambda: None,
        lambda: None,
    ]
    updates = list(follow(patient(run), wait=lambda _seconds: stages.pop(0)(), clock=lambda: next(times)))
    assert [update.run.phase for update in updates] == [*["running"] * 6, "lost"]
