"""`gangline logs`: the lines of an attempt, and of those that come after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangline.cli import logs
from gangline.cli.main import main
from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import Phase, ProcessId, RunState
from tests.boards import write_board


class World:
    """A run on two hosts of this computer."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.layout = RunLayout(home, "calm-otter-7")
        self.layout.folder.mkdir(parents=True)
        hosts = tuple(Host(name=name, workdir=str(home / name), python="python") for name in ("pc1", "pc2"))
        write_json(self.layout.cluster, Cluster(name="home", hosts=hosts).to_json())
        self.stands("running", 1)
        self.next: list[Callable[[], None]] = []

    def stands(self, phase: Phase, attempt: int) -> None:
        RunState(name="tiny", phase=phase, attempt=attempt, supervisor=ProcessId.current()).save(self.layout)

    def says(self, host: str, rank: int, attempt: int, line: str) -> None:
        folder = RunLayout(self.home / host, "calm-otter-7").attempt(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{rank}.log").open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path))
    world = World(tmp_path)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: world.next.pop(0)())
    monkeypatch.setattr(logs, "time", clock)
    world.says("pc1", 0, 1, "a")
    world.says("pc2", 1, 1, "b")
    return world


def test_logs_that_are_followed_go_on_with_the_next_attempt(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        world.says("pc2", 1, 1, "the last of it")
        world.stands("restarting", 1)

    def comes_up() -> None:
        world.stands("running", 2)

    def speaks() -> None:
        world.says("pc1", 0, 2, "c")
        world.stands("finished", 2)

    world.next = [fails, comes_up, speaks]
    assert main(["logs", "calm", "-f"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["pc1 rank 0  a", "pc2 rank 1  b", "pc2 rank 1  the last of it", "c"]
    assert said.err == "attempt 2\n"


def test_logs_of_one_attempt_stay_with_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.says("pc1", 0, 2, "c")
    world.stands("running", 2)
    world.next = [lambda: world.stands("finished", 2)]
    assert main(["logs", "calm", "-f", "--attempt", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["pc1 rank 0  a", "pc2 rank 1  b"]


def test_ranks_that_come_up_later_are_followed_too(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_S", -1.0)
    world.next = [lambda: world.says("pc2", 2, 1, "late"), lambda: world.stands("finished", 1)]
    assert main(["logs", "calm", "-f"]) == 0
    assert "pc2 rank 2  late" in capsys.readouterr().out


def test_hosts_that_take_no_part_are_not_asked(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.says("pc1", 0, 2, "c")
    world.says("pc2", 1, 2, "not of this attempt")
    write_board(world.layout, 2, ["pc1"])
    world.stands("finished", 2)
    assert main(["logs", "calm"]) == 0
    assert capsys.readouterr().out == "c\n"


@pytest.mark.parametrize(
    ("words", "what"), [(["--rank", "7"], "has no rank 7"), (["--attempt", "3"], "has no logs yet")]
)
def test_what_is_not_there_is_said(
    world: World, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    world.stands("finished", 1)
    assert main(["logs", "calm", *words]) == UsageError.exit_code
    assert what in capsys.readouterr().err
