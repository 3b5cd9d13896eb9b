"""`gangline explain`: a run, a finding, a log file, and what it says to anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline.cli.main import main
from gangline.control.user_command import CommandRecord
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from tests.unit.diagnose.lines import LINES
from tests.unit.report.stories import Past, killed_rank


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A failed run in the home of this computer."""
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    past = Past(tmp_path)
    killed_rank(past)
    hosts = tuple(Host(name=name, workdir=str(tmp_path / "home"), python="python") for name in ("pc1", "pc2", "pc3"))
    write_json(past.layout.cluster, Cluster(name="home", hosts=hosts).to_json())
    return past.layout


def test_a_run_is_explained_by_the_beginning_of_its_id(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "calm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("calm-otter-7 (tiny) has failed")
    assert "  cause    rank 2 on pc3 was killed by SIGKILL" in lines
    assert lines[-1].startswith("to go on:  gangline resume calm-otter-7")


def test_a_run_as_json(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "calm-otter-7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["attempts"][0]["cause"]["rank"] == 2


@pytest.mark.parametrize(("words", "ahead"), [(None, "start it anew"), (("--resume", "last"), "gangline resume")])
def test_a_program_of_the_users_own(
    run: RunLayout, capsys: pytest.CaptureFixture[str], words: tuple[str, ...] | None, ahead: str
) -> None:
    record = CommandRecord(words=("train.py",), resume_words=words, folder="/srv", project={})
    write_json(run.folder / "command.json", record.to_json())
    assert main(["explain", "calm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step" not in lines[2]
    assert lines[-1].startswith(f"to go on:  {ahead}")


def test_a_finding(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "e-net-07"]) == 0
    assert capsys.readouterr().out.startswith("E-NET-07  warn; info\n  means  ")
    assert main(["explain", "E-NET-07", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "E-NET-07"
    assert main(["explain", "E-NET-77"]) == 2
    assert "E-NET-07" in capsys.readouterr().err


def test_a_log_file(run: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(f"step 1\n{LINES['no-space']}\n", encoding="utf-8")
    assert main(["explain", "train.log"]) == 0
    assert "cause    a disk is full" in capsys.readouterr().out
    assert main(["explain", "./train.log", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"][0]["id"] == "no-space"


def test_a_file_of_the_name_of_a_run_does_not_hide_the_run(
    run: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calm-otter-7").write_text("nothing\n", encoding="utf-8")
    assert main(["explain", "calm-otter-7"]) == 0
    assert "killed by SIGKILL" in capsys.readouterr().out
    assert main(["explain", "./calm-otter-7"]) == 0
    assert "nothing in it is known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "says"), [("no/such.log", "is neither a file nor a folder"), ("bold-bear-1", "no such run")]
)
def test_what_is_nothing_is_a_usage_error(
    run: RunLayout, capsys: pytest.CaptureFixture[str], word: str, says: str
) -> None:
    assert main(["explain", word]) == 2
    assert says in capsys.readouterr().err
