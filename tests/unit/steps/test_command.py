"""A run of the user's own command: its words, and where they run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.steps.command import Command, command_gang, draft, program_of

CLUSTER = Cluster(name="c", hosts=(Host(name="pc1", workdir="/w", python="/p", slots=2),))


def order(flag: str | None) -> Command:
    return Command(home=Path("/home"), words=("train.py", "--lr", "1"), folder=Path("/folder"), resume_flag=flag)


def test_every_attempt_runs_in_the_folder_of_the_run_whatever_has_changed() -> None:
    record = draft(order("--resume last"))
    changed = dataclasses.replace(record, project={"name": "other"})
    first, second = program_of(record, gang(1)), program_of(changed, gang(2))
    assert first.cwd == second.cwd == "runs/calm-otter-7/project"
    assert first.argv == ("train.py", "--lr", "1")
    assert second.argv == ("train.py", "--lr", "1", "--resume", "last")


def gang(attempt: int):
    return command_gang(CLUSTER, "calm-otter-7", attempt)


def test_a_resume_flag_whose_quotes_do_not_close_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be split into words") as caught:
        draft(order("--x 'y"))
    assert "--x 'y: No closing quotation" in caught.value.seen
    assert "close its quotes" in caught.value.fix
