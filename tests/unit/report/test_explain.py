"""`explain RUN`: the cause comes first, echoes are called echoes, and no host's clock decides anything."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.launch.backend import HostStatus
from gangline.report.explanation import explain_json, explain_lines
from gangline.report.follow import View
from gangline.report.run_history import MOST_ATTEMPTS, MOST_ROWS, RunHistory, event_rows, read_history
from gangline.runs.cluster import Host
from gangline.runs.layout import RunLayout
from gangline.runs.state import ProcessId
from gangline.transport.local import LocalTransport
from tests.unit.report.stories import HERE, RESET, STORIES, Past, ended, failure

SCREENS = Path(__file__).parent / "screens"


def told(past: Past, *, keeper: LocalTransport | None = None, kept: RunLayout | None = None) -> RunHistory:
    return read_history(past.view, records=kept or past.layout, remote=keeper)


def screen(past: Past, *, is_job: bool = True, can_resume: bool = True) -> list[str]:
    return explain_lines(told(past), is_job=is_job, can_resume=can_resume)


def rows(lines: list[str], label: str) -> list[str]:
    """What stands behind a label, in the first attempt that has it."""
    found: list[str] = []
    for line in lines:
        if line.startswith(f"  {label}"):
            found = [line[2:][9:]]
        elif found and line.startswith(" " * 11):
            found.append(line[11:])
        elif found:
            break
    return found


@pytest.mark.parametrize("name", STORIES)
def test_the_whole_screen(tmp_path: Path, name: str) -> None:
    past = Past(tmp_path)
    STORIES[name](past)
    is_job = name != "own-program"
    lines = screen(past, is_job=is_job, can_resume=is_job)
    assert "\n".join(lines) + "\n" == (SCREENS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("apart", [False, True])
def test_a_killed_rank_is_the_cause_and_those_that_lost_it_are_echoes(tmp_path: Path, apart: bool) -> None:
    past = Past(tmp_path, apart=apart)
    STORIES["killed-rank"](past)
    lines = screen(past)
    assert rows(lines, "cause") == ["rank 2 on pc3 was killed by SIGKILL"]
    first, second = rows(lines, "echoes")
    assert first.startswith("rank 0 on pc1: ")
    assert "Connection reset by peer" in first
    assert second == "rank 1 on pc2: ended with the others, by SIGTERM"
    assert lines[-1].startswith("to go on:  gangline resume calm-otter-7")


def test_events_are_told_as_the_supervisor_wrote_them_whatever_their_times_say(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1"])
    past._now -= 7200  # somebody put the clock back
    past.event("unreachable", host="pc1")
    past.event("reachable", host="pc1", seconds=2.0)
    past.state("running")
    words = [row[10:] for row in rows(screen(past), "events")]
    assert words == ["gang started on pc1", "pc1 does not answer", "pc1 answers again after 2.0 s"]


def test_a_run_that_finished_early_says_why(tmp_path: Path) -> None:
    past = Past(tmp_path)
    why = "the evaluation loss has not improved in 3 evaluations: the lowest is 1.9, of step 40"
    past.event("started", source="worker", step=0, steps=400)
    past.event("early-stopping", source="worker", step=70, what=why)
    past.state("running")
    assert f"early stopping: {why}" not in screen(past)
    past.state("finished")
    assert screen(past)[1] == f"early stopping: {why}"
    assert explain_json(told(past), is_job=True, can_resume=True)["early_stopping"] == why


def test_ends_of_one_host_keep_the_order_of_its_host_agent_and_hosts_that_of_the_gang(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc2", "pc1"])
    past.ends(
        ended("pc1", failure(2, what=RESET, time=-999.0)),
        ended("pc2", failure(0, what="row 7 is empty", time=50.0), failure(1, what=RESET, time=40.0)),
    )
    past.state("failed")
    story = told(past)
    assert [(end.host, end.rank) for end in story.attempts[0].ends] == [("pc2", 1), ("pc2", 0), ("pc1", 2)]
    assert rows(screen(past), "cause") == ["rank 0 on pc2: row 7 is empty"]


def test_a_second_failure_of_its_own_is_no_echo(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.ends(ended("pc1", failure(0, what="disk full")), ended("pc2", failure(1, what="disk full", time=1.0)))
    past.state("failed")
    lines = screen(past)
    assert rows(lines, "also") == ["rank 1 on pc2: disk full"]
    assert rows(lines, "echoes") == []


def test_what_was_ordered_to_end_was_ended_by_gangline(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["hang"](past)
    assert rows(screen(past), "echoes") == ["rank 0 on pc1: ended by gangline", "rank 1 on pc2: ended by gangline"]


def test_of_a_hang_the_stacks_of_those_that_wait_are_shown(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["hang"](past)
    stacks = rows(screen(past), "stacks")
    assert stacks[:2] == ["rank 0 on pc1 in exchange of step 57", "  all_reduce (distributed.py:2800)"]
    assert not any(row.startswith("rank 2") for row in stacks)


def test_a_run_that_went_on_by_itself_says_from_where_and_without_whom(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["lost-host"](past)
    lines = screen(past)
    assert rows(lines, "then") == ["attempt 2 went on by itself from step 130, without pc3, 1 step lost"]
    assert lines[-1] == "to go on:  nothing to do: it runs; attempt 2 went on from step 130 by itself"
    assert "then: gangline resume" not in "\n".join(lines)
    assert rows(lines, "unseen") == ["pc3 did not answer at the end: whether something is left there is not known"]


def test_an_attempt_that_somebody_resumed_says_so(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.ends(ended("pc1", returncode=0), result="stopped")
    past.event("started", attempt=2, hosts=["pc1"])
    past.state("running", attempt=2)
    assert rows(screen(past), "then") == ["attempt 2 was begun by gangline resume"]


def test_the_verdict_of_torchrun_is_not_presented(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["own-program"](past)
    text = "\n".join(screen(past, is_job=False, can_resume=False))
    assert "Root Cause" not in text
    assert 'what torchrun calls the "root cause" is left out' in text
    assert "the package trl is not in the environment of that host" in text
    assert "start it anew with gangline run" in text
    assert "step" not in text.splitlines()[2]


def test_a_cause_that_says_what_its_words_mean_is_not_explained_twice(tmp_path: Path) -> None:
    past = Past(tmp_path)
    words = "ifa != nullptr. Unable to find address for: enp5s0"
    past.ends(ended("pc1", failure(0, log_tail=[words])))
    past.state("failed")
    lines = screen(past)
    assert rows(lines, "cause") == ["rank 0 on pc1: pc1 has no network interface enp5s0 with an address"]
    assert rows(lines, "known") == []


@pytest.mark.parametrize(
    ("phase", "more", "end"),
    [
        ("preparing", {}, "nothing yet: a command on this computer prepares an attempt"),
        ("running", {}, "nothing to do: it runs; gangline attach calm-otter-7 follows it"),
        ("stopping", {}, "wait until it has ended: its ranks save and leave"),
        ("restarting", {}, "nothing to do: the next attempt begins by itself"),
        ("finished", {}, "nothing to do: it has finished"),
        ("stopped", {}, "gangline resume calm-otter-7   # from the beginning: no checkpoint was committed"),
        ("running", {"gone": True}, "gangline stop calm-otter-7 && gangline resume calm-otter-7"),
    ],
)
def test_how_it_goes_on_from_every_phase(tmp_path: Path, phase: Any, more: dict[str, Any], end: str) -> None:
    past = Past(tmp_path)
    me = ProcessId.current()
    gone = {"supervisor": ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1)} if more else {}
    past.state(phase, **gone)
    assert screen(past)[-1].startswith(f"to go on:  {end}")


def test_while_it_runs_a_failing_part_is_told_so_far(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1"])
    past.event("failing", what="rank 0 on pc1: disk full")
    past.state("stopping")
    lines = screen(past)
    assert lines[2] == "attempt 1 on pc1: no step, goes on"
    assert rows(lines, "cause") == ["rank 0 on pc1: disk full"]


def test_what_ended_a_start_before_any_rank_ran_is_told(tmp_path: Path) -> None:
    past = Past(tmp_path)
    error = {"kind": "HostUnreachable", "what": "pc2 does not answer", "seen": "no route", "fix": "switch it on"}
    past.state("failed", error=error)
    lines = screen(past)
    assert rows(lines, "cause") == ["pc2 does not answer"]
    assert rows(lines, "fix") == ["switch it on"]


class Head(LocalTransport):
    """The head that keeps the records, if it answers."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(Host(name="pc1", workdir="/", python="python"))
        self.error = error

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        if self.error is not None:
            raise self.error
        return super().read(path, offset=offset, limit=limit)


def kept_by_head(tmp_path: Path, head: Head) -> tuple[Past, RunLayout]:
    """The records lie on the head; here is a copy of where the run stands."""
    past = Past(tmp_path, apart=True)
    past.layout, past.head = past.head, past.layout  # it writes there
    STORIES["killed-rank"](past)
    (past.head.folder / "state.json").write_bytes(past.layout.state.read_bytes())
    (past.layout.folder / "metrics.jsonl").write_bytes(past.head.metrics.read_bytes())
    past.view = View(layout=past.head, head=head, head_layout=past.layout)
    return past, past.layout


def test_the_records_of_a_run_that_the_head_keeps_are_read_there(tmp_path: Path) -> None:
    head = Head()
    past, kept = kept_by_head(tmp_path, head)
    story = told(past, keeper=head, kept=kept)
    assert story.attempts[0].error is not None
    assert story.attempts[0].error["rank"] == 2
    assert story.gaps == ()


def test_a_head_that_does_not_answer_leaves_a_gap_and_the_rest_is_told(tmp_path: Path) -> None:
    head = Head(HostUnreachable("pc1 does not answer"))
    past, kept = kept_by_head(tmp_path, head)
    story = told(past, keeper=head, kept=kept)
    assert story.gaps == ("pc1 does not answer: what it wrote is missing",)
    lines = explain_lines(story, is_job=True, can_resume=True)
    assert lines[1] == "missing: pc1 does not answer: what it wrote is missing"
    assert lines[-1].startswith("to go on:  gangline resume")


def test_somebody_else_in_the_place_of_the_head_ends_it(tmp_path: Path) -> None:
    head = Head(HostKeyRefused("pc1 shows another key"))
    past, kept = kept_by_head(tmp_path, head)
    with pytest.raises(HostKeyRefused):
        told(past, keeper=head, kept=kept)


@pytest.mark.parametrize("nonsense", [b"[]", b"not json", b'{"result": "fine", "hosts": {}}', b'{"hosts": 7}'])
def test_an_outcome_that_is_none_is_a_gap(tmp_path: Path, nonsense: bytes) -> None:
    past = Past(tmp_path)
    past.state("failed")
    past.layout.attempt(1).mkdir(parents=True)
    (past.layout.attempt(1) / "outcome.json").write_bytes(nonsense)
    (gap,) = told(past).gaps
    assert "attempts/1/outcome.json is damaged" in gap
    head = Head()
    (past.layout.attempt(1) / "outcome.json").rename(past.layout.attempt(1) / "there")
    kept = RunLayout(tmp_path / "kept", "calm-otter-7")
    kept.attempt(1).mkdir(parents=True)
    (kept.attempt(1) / "outcome.json").write_bytes(nonsense)
    assert told(past, keeper=head, kept=kept).gaps[0].startswith("what pc1 says cannot be understood")


def test_a_failure_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.ends(ended("pc1", failure(0, what="row 7 is empty")), ended("pc2", failure(1, what=RESET)))
    path = past.layout.attempt(1) / "outcome.json"
    outcome = json.loads(path.read_text())
    outcome["failures"].insert(0, {"rank": "none", "host": 3})
    path.write_text(json.dumps(outcome))
    past.state("failed")
    assert rows(screen(past), "echoes")[0].startswith("rank 1 on pc2")


def test_what_hosts_say_cannot_steer_the_terminal(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1\x1b[2J"])
    evil = "\x1b]0;owned\x07CUDA out of \x1b[31mmemory\x9b1m. Tried to allocate 2.00 GiB"
    past.ends(ended("pc1", failure(0, what=evil, log_tail=["\x1b[2Jlast\u202e words"])))
    past.state("failed")
    lines = screen(past)
    assert all(line.isprintable() for line in lines)
    assert rows(lines, "cause") == ["rank 0 on pc1: CUDA out of memory1m. Tried to allocate 2.00 GiB"]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.ends(ended("pc1", failure(0, what="x" * 10_000)))
    past.state("failed")
    assert max(map(len, screen(past))) < 450


def test_the_same_as_json(tmp_path: Path) -> None:
    past = Past(tmp_path)
    STORIES["lost-host"](past)
    document = json.loads(json.dumps(explain_json(told(past), is_job=True, can_resume=True)))
    assert (document["run"], document["phase"], document["steps"]) == ("calm-otter-7", "running", 400)
    first, second = document["attempts"]
    assert (first["attempt"], first["from_step"], first["to_step"], first["committed_step"]) == (1, 0, 130, 120)
    assert first["cause"]["host"] == "pc3"
    assert [(each["rank"], each["ordered"]) for each in first["echoes"]] == [(0, True), (1, True)]
    assert (second["by_itself"], second["hosts"], second["result"]) == (True, ["pc1", "pc2"], None)
    assert document["go_on"] == {
        "command": None,
        "why": "nothing to do: it runs; attempt 2 went on from step 130 by itself",
    }


def test_of_a_run_that_fails_for_days_the_newest_attempts_are_told(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.state("running", attempt=1_000_000)
    story = told(past)
    assert len(story.attempts) == MOST_ATTEMPTS
    assert story.attempts[-1].number == 1_000_000
    assert story.gaps == (f"attempts 1 to {1_000_000 - MOST_ATTEMPTS} are not shown",)


def test_the_same_event_again_and_again_is_one_row() -> None:
    saves = [{"event": "committed", "step": step, "time": "2026-11-21T22:31:07.000Z"} for step in (10, 20, 30)]
    assert event_rows(saves) == ["22:31:07  checkpoint of step 30 (3 times)"]


def test_many_events_keep_the_first_and_the_last() -> None:
    events = [{"event": f"e{number}", "time": ""} for number in range(100)]
    shown = event_rows(events)
    assert len(shown) == MOST_ROWS
    assert shown[0].endswith("e0")
    assert shown[-1].endswith("e99")
    assert "77 more" in shown[8]


def test_a_host_whose_host_agent_went_without_a_word_is_a_cause_without_a_rank(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.ends(ended("pc1", failure(0, what=RESET)), HostStatus(host="pc2", phase="lost"))
    past.state("failed")
    lines = screen(past)
    assert rows(lines, "cause") == ["the gangline agent on pc2 died; its ranks were stopped"]
    assert len(rows(lines, "echoes")) == 1


def test_nothing_at_all_is_told_without_a_fuss(tmp_path: Path) -> None:
    past = Past(tmp_path)
    story = read_history(View(layout=past.layout, head=HERE, head_layout=past.head), records=past.layout, remote=None)
    assert explain_lines(story, is_job=True, can_resume=True)[0] == "calm-otter-7 cannot be read"
