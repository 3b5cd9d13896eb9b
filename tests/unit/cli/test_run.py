"""`gangline run`: what the user says of a stall."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gangline import app
from gangline.cli import ps
from gangline.cli.main import main
from gangline.control.listing import RunListing
from gangline.control.user_command import CommandRecord
from gangline.errors import RunFailed, UsageError
from gangline.runs.layout import RunLayout
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId, RunState


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CommandRecord]:
    """What reaches the main path."""
    records: list[CommandRecord] = []

    def run(record: CommandRecord, **_context: object) -> RunLayout:
        records.append(record)
        raise RunFailed("nothing is started here")

    monkeypatch.setattr(app, "run", run)
    return records


@pytest.mark.parametrize(
    ("words", "after_s", "action"),
    [
        ([], 600.0, "report"),
        (["--stall-after", "90s"], 90.0, "report"),
        (["--stall-after", "1.5h", "--on-stall", "report"], 5400.0, "report"),
        (["--stall-after", "30 min", "--on-stall", "stop"], 1800.0, "stop"),
        (["--on-stall", "stop"], 600.0, "stop"),
        (["--stall-after", "none"], None, "report"),
    ],
)
def test_the_choice_is_the_users(asked: list[CommandRecord], words: list[str], after_s: float, action: str) -> None:
    assert main(["run", *words, "--", "train.py"]) == RunFailed.exit_code
    (record,) = asked
    assert (record.stall_after_s, record.on_stall, record.words) == (after_s, action, ("train.py",))


@pytest.mark.parametrize(("words", "restarts"), [([], 0), (["--restarts", "3"], 3)])
def test_how_often_it_is_started_again_is_the_users_choice(
    asked: list[CommandRecord], words: list[str], restarts: int
) -> None:
    assert main(["run", *words, "--", "train.py"]) == RunFailed.exit_code
    assert asked[0].restarts == restarts


@pytest.mark.parametrize(
    "words",
    [
        ["--stall-after", "10"],
        ["--stall-after", "soon"],
        ["--stall-after", "-5m"],
        ["--stall-after", "9s"],
        ["--stall-after", "721h"],
        ["--stall-after", "999999999h"],
        ["--stall-after", "nan s"],
        ["--stall-after", ""],
        ["--stall-after", "none", "--on-stall", "stop"],
    ],
)
def test_what_is_no_time_is_refused_before_anything_happens(
    asked: list[CommandRecord], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words, "--", "train.py"]) == UsageError.exit_code
    assert asked == []
    assert "--stall-after" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-1", "often", "1001"])
def test_what_is_no_number_of_restarts_is_refused(
    asked: list[CommandRecord], count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--restarts", count, "--", "train.py"]) == UsageError.exit_code
    assert asked == []
    assert "--restarts" in capsys.readouterr().err


def test_ps_says_since_when_a_run_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path))
    state = RunState(
        name="tiny", phase="running", supervisor=ProcessId.current(), quiet_since="2026-01-01T12:00:00.000Z"
    )
    states = {"calm-otter-7": state, "pale-heron-2": dataclasses.replace(state, phase="stopped")}
    listed = [RunListing(record=RunRecord(id=run, state=each), last=None) for run, each in states.items()]
    monkeypatch.setattr(ps, "list_runs", lambda _home: listed)
    assert main(["ps"]) == 0
    _, running, stopped = capsys.readouterr().out.splitlines()
    assert "running (quiet for " in running
    assert "quiet" not in stopped
    assert main(["ps", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["quiet_since"] for row in rows] == ["2026-01-01T12:00:00.000Z", None]


def test_ps_says_that_a_run_finished_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path))
    record = RunRecord(id="calm-otter-7", state=RunState(name="tiny", phase="finished"))
    lasts = [{"step": 40, "steps": 100}, {"step": 100, "steps": 100}, None]
    monkeypatch.setattr(ps, "list_runs", lambda _home: [RunListing(record=record, last=last) for last in lasts])
    assert main(["ps"]) == 0
    assert ["early" in line for line in capsys.readouterr().out.splitlines()[1:]] == [True, False, False]
    assert main(["ps", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["finished_early"] for row in rows] == [True, False, False]


def test_ps_has_a_column_of_slurm_jobs_where_a_run_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path))
    record = RunRecord(id="calm-otter-7", state=RunState(name="tiny", phase="finished"))
    jobs: list[str | None] = ["4711_3", None]
    monkeypatch.setattr(
        ps, "list_runs", lambda _home: [RunListing(record=record, last=None, slurm_job=job) for job in jobs]
    )
    assert main(["ps"]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[-2:] == ["slurm", "job"]
    assert [row[-1] for row in rows] == ["4711_3", "-"]
    jobs = [None]
    assert main(["ps"]) == 0
    assert "slurm" not in capsys.readouterr().out
