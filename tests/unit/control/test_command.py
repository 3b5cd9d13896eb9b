"""A run of the user's own command: its words, and where they run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gangline.control.user_command import CommandRecord, again_of, command_gang, draft, program_of
from gangline.errors import UsageError
from gangline.launch.backend import LaunchRequest
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Again, StallWatch
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from tests.recorded import RECORDED

CLUSTER = Cluster(name="c", hosts=(Host(name="pc1", workdir="/w", python="/p", slots=2),))


def order(flag: str | None, **choices) -> CommandRecord:
    return draft(("train.py", "--lr", "1"), folder=Path("/folder"), resume_flag=flag, **choices)


def test_every_attempt_runs_in_the_folder_of_the_run_whatever_has_changed() -> None:
    record = order("--resume last")
    changed = dataclasses.replace(record, project={"name": "other"})
    first, second = program_of(record, gang(1)), program_of(changed, gang(2))
    assert first.cwd == second.cwd == "runs/calm-otter-7/project"
    assert first.argv == ("train.py", "--lr", "1")
    assert second.argv == ("train.py", "--lr", "1", "--resume", "last")


def gang(attempt: int):
    return command_gang(CLUSTER, "calm-otter-7", attempt)


def test_a_resume_flag_whose_quotes_do_not_close_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be split into words") as caught:
        order("--x 'y")
    assert "--x 'y: No closing quotation" in caught.value.seen
    assert "close its quotes" in caught.value.fix


def kept(folder: Path, record: dict) -> CommandRecord:
    layout = RunLayout(folder, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    write_json(layout.command, record)
    loaded = CommandRecord.of(layout)
    assert loaded is not None
    return loaded


def test_what_is_done_about_a_stall_is_kept_for_every_attempt(tmp_path: Path) -> None:
    asked = order("--resume last", stall_after_s=1800.0, on_stall="stop")
    record = kept(tmp_path, asked.to_json())
    stall = StallWatch(after_s=1800.0, action="stop", can_resume=True)
    for attempt in (1, 2):
        program = program_of(record, gang(attempt))
        request = DirectBackend(num_cpus=1).render(CLUSTER, gang(attempt), port=29511, program=program)
        assert LaunchRequest.from_json(request.to_json()).stall == stall


def test_it_is_started_again_by_itself_as_often_as_the_user_says_with_the_words_for_it(tmp_path: Path) -> None:
    record = kept(tmp_path, order("--resume last", restarts=3).to_json())
    again = again_of(record, gang(1))
    assert again is not None
    assert (again.restarts, again.program) == (3, program_of(record, gang(2)))
    assert Again.from_json(json.loads(json.dumps(again.to_json()))) == again


def test_by_default_it_is_not_started_again(tmp_path: Path) -> None:
    assert again_of(kept(tmp_path, order("--resume last").to_json()), gang(1)) is None


def test_nobody_looks_for_a_stall_where_the_user_said_so(tmp_path: Path) -> None:
    record = kept(tmp_path, order(None, stall_after_s=None).to_json())
    assert program_of(record, gang(1)).stall is None


def test_a_run_from_before_there_was_a_choice_is_told_of_after_ten_minutes(tmp_path: Path) -> None:
    old = order(None).to_json()
    del old["stall_after_s"], old["on_stall"]
    assert kept(tmp_path, old).stall == StallWatch(after_s=600.0, action="report", can_resume=False)


def test_a_request_from_before_there_was_a_choice_asks_for_nothing() -> None:
    request = DirectBackend(num_cpus=1).render(CLUSTER, gang(1), port=29511).to_json()
    del request["stall"]
    assert LaunchRequest.from_json(request).stall is None


def test_a_recorded_run_says_in_the_old_word_that_a_stall_is_reported() -> None:
    layout = RunLayout(RECORDED / "command-finished", "bright-seal-4")
    record, request = CommandRecord.of(layout), LaunchRequest.load(layout.request(1))
    assert '"on_stall": "tell"' in layout.command.read_text()
    assert record is not None
    assert record.stall == request.stall == StallWatch(after_s=600.0, action="report", can_resume=False)
