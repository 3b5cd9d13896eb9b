"""Following: whole lines only, in order, from two places, until the run has ended."""

from __future__ import annotations

import io
import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from gangline.planner.outcome import spent
from gangline.report.follow import Update, follow
from gangline.report.live import ProgressLine, summary, watch_run
from gangline.report.tail import History, JsonTail, Tail
from gangline.runs.state import ProcessId, RunState
from tests.unit.planner.outcomes import line as figures
from tests.unit.planner.outcomes import outcome, plan
from tests.unit.report.followed import HERE, Run, board, evaluation, step


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_line_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(HERE, path)
    assert tail.lines() == []
    path.write_text("one\ntw", encoding="utf-8")
    assert tail.lines() == ["one"]
    path.write_text("one\ntwo\n", encoding="utf-8")
    assert tail.lines() == ["two"]
    assert tail.lines() == []


def test_a_torn_line_does_not_hide_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_text('{"a": 1}\n{"b": \n[3]\n{"c": 2}\n', encoding="utf-8")
    assert JsonTail(HERE, path).objects() == [{"a": 1}, {"c": 2}]


def test_updates_come_until_the_run_has_ended(run: Run) -> None:
    run.metrics(step(1))

    def wait(_seconds: float) -> None:
        run.metrics(step(2))
        run.phase("finished")

    updates = list(follow(run.view, wait=wait))
    assert [[record["step"] for record in update.records] for update in updates] == [[1], [2]]
    assert [update.last for update in updates] == [False, True]


def test_a_run_whose_supervisor_is_gone_is_not_waited_for(run: Run) -> None:
    me = ProcessId.current()
    run.phase("running", ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1))
    (update,) = follow(run.view)
    assert update.run.phase == "lost"


def test_events_of_supervisor_and_head_are_both_read(tmp_path: Path) -> None:
    run = Run(tmp_path, apart=True)
    run.layout.events.write_text('{"kind": "event", "event": "committed"}\n', encoding="utf-8")
    run.head.events.write_text('{"kind": "event", "event": "resumed"}\n', encoding="utf-8")
    run.phase("finished")
    (update,) = follow(run.view)
    assert {record["event"] for record in update.records} == {"committed", "resumed"}


def shown(run: Run, *updates: list[dict[str, Any]], live: bool, width: int = 100) -> str:
    stream = io.StringIO()
    ticks = iter(range(100))
    progress = ProgressLine(stream, live=live, clock=lambda: next(ticks), width=lambda: width)
    record = next(follow(run.view)).run
    for records in updates:
        progress.show(Update(records=tuple(records), run=record))
    progress.finish()
    return stream.getvalue()


def test_a_terminal_has_one_line_that_is_overwritten(run: Run) -> None:
    text = shown(run, [step(1)], [step(2, 2.113)], live=True)
    assert text.count("\n") == 1
    assert "step 2/100  loss 2.113  lr 1.8e-04  4 510 tok/s  0.20 s/step  mem 410 MiB  eta 19.6 s" in text
    assert text.split("\r\x1b[K")[1].startswith("step 1/100")


@pytest.mark.parametrize("width", [30, 60, 80])
def test_on_a_narrow_terminal_the_line_stays_one_line_and_keeps_the_time_left(run: Run, width: int) -> None:
    lines = shown(run, [step(1)], live=True, width=width).split("\r\x1b[K")
    assert all(len(line.rstrip("\n")) < width for line in lines)
    assert ("eta 19.8 s" in lines[1]) == (width > 30)


def test_evaluations_and_checkpoints_have_lines_of_their_own(run: Run) -> None:
    committed = {"kind": "event", "source": "supervisor", "event": "committed", "step": 2}
    text = shown(run, [step(1), evaluation(1, 2.25), step(2), committed], live=True)
    lines = [line.replace("\r\x1b[K", "") for line in text.split("\n")]
    assert "evaluation at step 1  loss 2.25  perplexity 9.5" in lines[0]
    assert "checkpoint committed  step 2" in text


def test_without_a_terminal_there_is_a_line_now_and_then_and_the_last_one(run: Run) -> None:
    text = shown(run, *[[step(number)] for number in range(1, 12)], live=False)
    assert "\r" not in text
    assert "\x1b" not in text
    numbers = [line.split("/")[0] for line in text.splitlines()]
    assert numbers[0] == "step 1"
    assert numbers[-1] == "step 11"
    assert 2 < len(numbers) < 6


@pytest.mark.parametrize("live", [True, False])
def test_the_end_is_told_after_the_last_step(run: Run, live: bool) -> None:
    finished = {"kind": "event", "source": "supervisor", "event": "finished"}
    text = shown(run, [step(1), step(2)], [step(99), finished], [step(100)], live=live)
    assert text.rstrip().splitlines()[-1] == "finished"
    assert "step 100/100" in text.rstrip().splitlines()[-2]


@pytest.mark.parametrize("live", [True, False])
def test_ranks_that_turn_out_to_wait_for_each_other_are_told_once_each_time(run: Run, live: bool) -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, live=live, width=lambda: 100)
    record = next(follow(run.view)).run
    stuck = [
        board(done=False, sentence=f"0 of 1 ranks have joined after {seconds} s; rank 0 waits") for seconds in (60, 61)
    ]
    for each in (board(done=True), *stuck, board(done=True), stuck[0]):
        progress.show(Update(records=(), run=record, board=each))
    text = stream.getvalue()
    assert text.count("the rank has joined after 2.0 s") == 1
    assert text.count("rank 0 waits") == 2
    assert "starting" not in text


def test_a_failure_is_left_to_the_error_that_ends_the_command(run: Run) -> None:
    events = [
        {"kind": "event", "source": "supervisor", "event": event, "what": "row 7"} for event in ("failing", "failed")
    ]
    assert "row 7" not in shown(run, [step(1), *events], live=False)


def test_a_skipped_step_says_so(run: Run) -> None:
    assert "skipped" in shown(run, [step(3, skipped=True)], live=False)


def test_an_event_from_a_host_cannot_steer_the_terminal(run: Run) -> None:
    event = {"kind": "event", "source": "worker", "event": "save-failed", "why": "disk \x1b[2Jfull"}
    assert "save-failed  disk full" in shown(run, [event], live=False)


@pytest.mark.parametrize("live", [False, True])
def test_figures_from_a_host_cannot_steer_the_terminal(run: Run, live: bool) -> None:
    evil = "3\x1b[2J\x9b31m\u202e"
    records = [{**step(1), "step": evil}, {**step(1), "steps": evil}, {**evaluation(1, 2.0), "step": evil}]
    text = shown(run, records, live=live).replace("\r\x1b[K", "")
    assert "step 3" in text
    assert not [character for character in text if not character.isprintable() and character != "\n"]


def test_a_repeated_step_counts_once_with_its_last_figures() -> None:
    history = History()
    for record in (step(1, 3.0), step(2, 2.9), step(3, 9.0), step(2, 2.8), evaluation(2, 2.7)):
        history.add(record)
    assert history.losses() == [(1.0, 3.0), (2.0, 2.8), (3.0, 9.0)]
    assert history.evaluation_losses() == [(2.0, 2.7)]


def test_the_time_left_follows_the_last_steps() -> None:
    history = History()
    assert history.remaining_s() is None
    for number in range(1, 41):
        history.add(step(number, step_s=9.0 if number <= 20 else 0.5))
    assert history.remaining_s() == pytest.approx(30.0)


def test_the_end_says_losses_checkpoints_places_and_commands(run: Run) -> None:
    run.metrics(step(1, 6.0), evaluation(1, 5.9), step(2, 4.0), evaluation(2, 4.1))
    saved = run.layout.checkpoints / "step-00000002"
    saved.mkdir(parents=True)
    (saved / "COMMITTED").write_text("{}", encoding="utf-8")
    (run.layout.checkpoints / "step-00000003").mkdir()
    run.phase("finished")
    watched = watch_run(run.view, io.StringIO(), live=False)
    text = "\n".join(summary(run.view, watched, width=70, plain=True))
    assert "training loss    6 at step 1 -> 4 at step 2" in text
    assert "evaluation loss  5.9 at step 1 -> 4.1 at step 2" in text
    assert "checkpoints      step 2\n" in text
    assert str(run.layout.folder) in text
    assert "gangline chat calm-otter-7" in text
    assert "gangline export calm-otter-7" in text
    assert "resume" not in text


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_end_says_what_was_planned_of_this_attempt(run: Run, attempt: int) -> None:
    comparison = outcome(plan(), [figures(step) for step in range(1, 21)])
    assert comparison is not None
    run.layout.comparison.write_text(json.dumps({**comparison.to_json(), "attempt": attempt}), encoding="utf-8")
    run.phase("finished")
    watched = watch_run(run.view, io.StringIO(), live=False)
    lines = summary(run.view, watched, width=70, plain=True)
    measured = [each for each in lines if each.startswith("measured")]
    expected = "measured         step 0.8 s, planned 0.72 s (-10 %); resident memory pc2 5 GiB, planned 3 GiB (-40 %)"
    assert measured == ([expected] if attempt == 1 else [])


def test_the_end_says_where_the_time_of_every_rank_went(run: Run) -> None:
    report = spent([figures(step) for step in range(1, 21)], run_id="calm-otter-7", attempt=1)
    assert report is not None
    run.layout.times(1).parent.mkdir(parents=True, exist_ok=True)
    run.layout.times(1).write_text(json.dumps(report.to_json()), encoding="utf-8")
    run.phase("finished")
    watched = watch_run(run.view, io.StringIO(), live=False)
    lines = summary(run.view, watched, width=70, plain=True)
    at = lines.index("time of 18 steps, 14.4 s (waits: for slower ranks)")
    assert lines[at - 1] == ""
    assert lines[at + 1 : at + 4] == [
        "host  rank  computes  data  waits  network  rest",
        "pc1   0         75 %   0 %    0 %     12 %  12 %",
        "pc2   1         62 %   0 %   12 %     12 %  12 %",
    ]
    run.layout.times(1).write_text("[1]", encoding="utf-8")
    assert not any(each.startswith("time of") for each in summary(run.view, watched, width=70, plain=True))


@pytest.mark.parametrize("text", ["", "[", "[1]", "null"])
def test_a_comparison_that_cannot_be_read_is_none(run: Run, text: str) -> None:
    run.layout.comparison.write_text(text, encoding="utf-8")
    run.phase("finished")
    watched = watch_run(run.view, io.StringIO(), live=False)
    assert "measured" not in "\n".join(summary(run.view, watched, width=70, plain=True))


def test_a_stopped_run_says_how_to_go_on(run: Run) -> None:
    run.phase("stopped")
    watched = watch_run(run.view, io.StringIO(), live=False)
    text = "\n".join(summary(run.view, watched, width=70, plain=True))
    assert "gangline resume calm-otter-7" in text
    assert "gangline chat" not in text


def test_coming_back_shows_the_state_and_not_the_past(run: Run) -> None:
    run.metrics(step(1), evaluation(1, 3.0), step(2))
    run.phase("finished")
    stream = io.StringIO()
    watched = watch_run(run.view, stream, live=False, from_start=False)
    assert stream.getvalue().splitlines() == [line for line in stream.getvalue().splitlines() if "step 2/100" in line]
    assert watched.history.evaluation_losses() == [(1.0, 3.0)]


class Endless:
    """A file that a host makes up as it is read, and what was asked of it."""

    def __init__(self, piece: bytes) -> None:
        self.piece = piece
        self.num_reads = 0

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        del path, offset, limit
        self.num_reads += 1
        return self.piece


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    endless = Endless(b"x" * (1 << 22))
    lines = Tail(endless, tmp_path).stream()
    assert [len(next(lines)) for _ in range(3)] == [1 << 22] * 3
    assert endless.num_reads == 3


def test_of_records_without_end_some_are_taken_at_once(tmp_path: Path) -> None:
    endless = Endless(b'{"a": 1}\n' + b"\xff" * (1 << 20) + b"\n")
    tail = JsonTail(endless, tmp_path)
    assert tail.objects() == [{"a": 1}] * endless.num_reads
    assert endless.num_reads == 64
    assert tail.is_behind


def test_all_that_was_written_is_read_before_the_last_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.report.tail.AT_ONCE_BYTES", 1)
    run = Run(tmp_path)
    run.metrics(step(1), step(2))
    run.phase("finished")
    updates = list(follow(run.view))
    assert [update.last for update in updates] == [*[False] * (len(updates) - 1), True]
    assert [record["step"] for update in updates for record in update.records] == [1, 2]


BEGINNING = {
    "kind": "event",
    "source": "supervisor",
    "event": "beginning",
    "attempt": 2,
    "stage": "load",
    "what": "all 3 ranks load the model",
}


def test_what_the_ranks_do_before_the_first_step_is_a_line_of_its_own(run: Run) -> None:
    text = shown(run, [BEGINNING], [evaluation(0, 6.9), step(1)], live=False)
    assert text.splitlines()[0] == "all 3 ranks load the model"


def test_what_is_told_after_its_figures_came_is_not_shown(run: Run) -> None:
    begin = [{**BEGINNING, "stage": stage, "what": f"they {stage}"} for stage in ("load", "evaluate", "step")]
    first = {**evaluation(0, 6.9), "attempt": 2}
    lines = shown(run, [first, *begin[:2]], [begin[2]], [step(1, attempt=2), begin[2]], live=False).splitlines()
    assert [line for line in lines if line.startswith("they")] == ["they step"]
    assert "they load" in shown(run, [{**first, "attempt": 1}, begin[0]], live=False)


def test_who_comes_back_while_the_ranks_begin_sees_what_they_do(run: Run) -> None:
    with run.layout.events.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(BEGINNING) + "\n")
    run.metrics(step(1, attempt=1))
    stream = io.StringIO()
    ProgressLine(stream, live=False, width=lambda: 100).skip(next(follow(run.view)))
    assert "all 3 ranks load the model" in stream.getvalue().splitlines()
    run.metrics(step(2, attempt=2))
    stream = io.StringIO()
    progress = ProgressLine(stream, live=False, width=lambda: 100)
    progress.skip(next(follow(run.view)))
    progress.finish()
    assert "load the model" not in stream.getvalue()


def test_who_comes_back_to_a_run_that_prints_no_more_is_told_so(run: Run) -> None:
    state = RunState(name="tiny", phase="running", supervisor=ProcessId.current(), quiet_since="2026-01-01T12:00:00Z")
    state.save(run.layout)
    stream = io.StringIO()
    ProgressLine(stream, live=False, width=lambda: 100).skip(next(follow(run.view)))
    assert stream.getvalue() == "quiet  no rank has printed anything since 2026-01-01T12:00:00Z\n"
