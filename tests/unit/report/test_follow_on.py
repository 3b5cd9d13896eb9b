"""Following a run that goes on by itself: from one attempt to the next, wherever its head is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.report.follow import Update, View, follow
from gangline.report.live import ProgressLine
from gangline.runs.layout import RunLayout
from gangline.runs.state import Phase
from tests.unit.report.followed import HERE, RESTARTING, Run, board, step


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


RESTART = {**RESTARTING, "step": 2, "lost_steps": 1}
AGAIN = "attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 2 (1 step again)"


def supervisor_says(run: Run, *records: dict[str, Any]) -> None:
    with run.layout.events.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in records)


def test_a_run_between_two_attempts_is_followed_on(run: Run) -> None:
    run.metrics(step(1, attempt=1))
    stages = [
        lambda: run.phase("restarting"),
        lambda: supervisor_says(run, RESTART),
        lambda: run.phase("running", attempt=2),
        lambda: run.metrics(step(3, attempt=2)),
        lambda: run.phase("finished", attempt=2),
    ]
    updates = list(follow(run.view, wait=lambda _seconds: stages.pop(0)()))
    assert [update.run.phase for update in updates] == [
        "running",
        "restarting",
        "restarting",
        "running",
        "running",
        "finished",
    ]
    assert [update.last for update in updates] == [*[False] * 5, True]


@pytest.mark.parametrize("live", [True, False])
def test_the_next_attempt_is_one_line_and_then_its_figures(run: Run, live: bool) -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, live=live, width=lambda: 120)
    started = {"kind": "event", "source": "supervisor", "event": "started", "hosts": ["pc1", "pc2"]}
    resumed = {"kind": "event", "source": "worker", "event": "resumed", "attempt": 2, "step": 2}
    first = next(follow(run.view)).run
    run.phase("running", attempt=2)
    second = next(follow(run.view)).run
    progress.show(Update(records=({**started, "attempt": 1},), run=first, board=board(done=True)))
    progress.show(Update(records=(step(3, attempt=1),), run=first, board=board(done=True)))
    progress.show(Update(records=(RESTART, {**started, "attempt": 2}), run=second, board=board(done=False)))
    progress.show(Update(records=(resumed,), run=second, board=board(done=True)))
    progress.show(Update(records=(step(3, attempt=2),), run=second, board=board(done=True)))
    progress.finish()
    text = stream.getvalue()
    assert text.count(AGAIN) == 1
    assert text.count("gang started") == 1
    assert text.count("has joined after") == 1
    assert "resumed" not in text
    assert text.index(AGAIN) < text.rindex("step 3/100")
    assert ("starting, 2 s" in text) == live


def test_a_start_that_does_not_get_on_is_told_in_every_attempt(run: Run) -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, live=False, width=lambda: 120)
    stuck = board(done=False, sentence="0 of 1 ranks have joined after 20 s; rank 0 waits")
    for attempt in (1, 2):
        run.phase("running", attempt=attempt)
        progress.show(Update(records=(), run=next(follow(run.view)).run, board=stuck))
    assert stream.getvalue().count("rank 0 waits") == 2


@pytest.mark.parametrize(("phase", "attempt"), [("restarting", 1), ("running", 2)])
def test_who_comes_back_is_told_why_it_is_another_attempt(run: Run, phase: Phase, attempt: int) -> None:
    run.metrics(step(3, attempt=1))
    supervisor_says(run, RESTART)
    run.phase(phase, attempt=attempt)
    stream = io.StringIO()
    ProgressLine(stream, live=False, width=lambda: 120).skip(next(follow(run.view)))
    assert stream.getvalue().splitlines()[0] == AGAIN


@pytest.mark.parametrize(("phase", "attempt"), [("failed", 2), ("running", 3)])
def test_who_comes_back_later_is_not(run: Run, phase: Phase, attempt: int) -> None:
    supervisor_says(run, RESTART)
    run.phase(phase, attempt=attempt)
    stream = io.StringIO()
    ProgressLine(stream, live=False, width=lambda: 120).skip(next(follow(run.view)))
    assert "attempt 2" not in stream.getvalue()


def test_where_another_host_becomes_the_head_its_figures_are_read(tmp_path: Path) -> None:
    run = Run(tmp_path, apart=True)
    other = RunLayout(tmp_path / "other", run.layout.run_id)
    other.folder.mkdir(parents=True)
    heads = {1: (HERE, run.head), 2: (HERE, other)}
    view = View(layout=run.layout, head=HERE, head_layout=run.head, head_of=lambda number: heads[number])
    run.metrics(step(1, attempt=1))

    def go_on() -> None:
        run.metrics(step(2, attempt=1))
        supervisor_says(run, RESTART)
        # it has brought along what the head before had written
        records = [step(1, attempt=1), step(2, attempt=1), step(3, attempt=2)]
        other.metrics.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        run.phase("running", attempt=2)

    stages = [go_on, lambda: run.phase("finished", attempt=2)]
    updates = list(follow(view, wait=lambda _seconds: stages.pop(0)()))
    told = [(record.get("step"), record["attempt"]) for update in updates for record in update.records]
    assert told == [(1, 1), (2, 1), (3, 2), (2, 1)]  # the last is what the supervisor says
    assert view.at(2).head_layout == other


def test_a_view_that_is_opened_after_the_head_has_changed_reads_all_that_the_new_one_has(tmp_path: Path) -> None:
    run = Run(tmp_path, apart=True)
    other = RunLayout(tmp_path / "other", run.layout.run_id)
    other.folder.mkdir(parents=True)
    other.metrics.write_text(json.dumps(step(1, attempt=1)) + "\n" + json.dumps(step(3, attempt=2)) + "\n", "utf-8")
    run.phase("finished", attempt=2)
    view = View(layout=run.layout, head=HERE, head_layout=run.head, head_of=lambda _number: (HERE, other))
    (update,) = follow(view)
    assert [record["step"] for record in update.records] == [1, 3]
