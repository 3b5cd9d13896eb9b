"""`gangline stop`: what is waited for, and what is said then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangline.cli import stop
from gangline.cli.main import main
from gangline.control.supervision import RunHandle
from gangline.errors import RunFailed, UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import Phase, ProcessId, RunState
from tests.boards import write_board


class World:
    """A run on three hosts, and what happens to it while it is waited for."""

    def __init__(self, home: Path) -> None:
        self.layout = RunLayout(home, "calm-otter-7")
        self.layout.folder.mkdir(parents=True)
        names = ("pc1", "pc2", "pc3")
        hosts = tuple(Host(name=name, workdir=str(home / name), python="python") for name in names)
        write_json(self.layout.cluster, Cluster(name="home", hosts=hosts).to_json())
        self.asked: list[tuple[tuple[str, ...], bool]] = []
        self.next: list[Callable[[], None]] = []
        self.stands("running", 1, *names)

    def stands(self, phase: Phase, attempt: int, *hosts: str, error: dict[str, str] | None = None) -> None:
        state = RunState(name="tiny", phase=phase, attempt=attempt, supervisor=ProcessId.current(), error=error)
        state.save(self.layout)
        if hosts:
            write_board(self.layout, attempt, hosts)

    def stop(self, _run: RunHandle, *, now: bool = False, hosts: tuple[str, ...] = ()) -> bool:
        self.asked.append((tuple(hosts), now))
        return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path))
    world = World(tmp_path)
    monkeypatch.setattr(stop, "stop", world.stop)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: world.next.pop(0)())
    monkeypatch.setattr(stop, "time", clock)
    return world


def test_a_run_that_goes_on_without_a_host_is_waited_for(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.next = [
        lambda: world.stands("stopping", 1),
        lambda: world.stands("restarting", 1),
        lambda: world.stands("running", 2),
        lambda: world.stands("running", 2, "pc1", "pc2"),
    ]
    assert main(["stop", "calm", "--host", "pc3", "--host", "pc3"]) == 0
    assert world.asked == [(("pc3",), False)]
    assert world.next == []
    assert capsys.readouterr().out == "calm-otter-7 running without pc3\n"


def test_an_attempt_that_began_for_another_reason_is_asked_once_more(world: World) -> None:
    world.next = [
        lambda: world.stands("running", 2, "pc1", "pc2", "pc3"),
        lambda: world.stands("running", 2, "pc1", "pc2", "pc3"),
        lambda: world.stands("running", 3, "pc1", "pc2"),
    ]
    assert main(["stop", "calm", "--host", "pc3"]) == 0
    assert world.asked == [(("pc3",), False)] * 2


def test_a_run_that_fails_meanwhile_says_why(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    error = RunFailed("row 7", seen="empty", fix="write it").to_json()
    world.next = [lambda: world.stands("failed", 1, error=error)]
    assert main(["stop", "calm", "--host", "pc3"]) == RunFailed.exit_code
    said = capsys.readouterr()
    assert said.out == "calm-otter-7 failed\n"
    assert "row 7" in said.err


def test_a_run_that_finishes_meanwhile_is_no_error(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.next = [lambda: world.stands("finished", 1)]
    assert main(["stop", "calm", "--host", "pc3"]) == 0
    assert capsys.readouterr().out == "calm-otter-7 finished\n"


def test_a_run_that_ends_between_two_attempts_is_waited_for(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.stands("restarting", 1)
    world.next = [lambda: world.stands("restarting", 1), lambda: world.stands("stopped", 1)]
    assert main(["stop", "calm"]) == 0
    assert world.asked == [((), False)]
    assert capsys.readouterr().out == "calm-otter-7 stopped\n"


def test_a_host_cannot_leave_without_what_it_has_done(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "calm", "--host", "pc3", "--now"]) == UsageError.exit_code
    assert world.asked == []
    assert "--now does nothing with --host" in capsys.readouterr().err
