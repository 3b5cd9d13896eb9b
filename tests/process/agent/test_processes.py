"""Processes of other users, where /proc shows everybody only his own (hidepid); and families that end as a whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.agent.supervise import processes
from gangline.agent.supervise.left import left_of
from gangline.runs.state import ProcessId


@pytest.fixture
def hidden(monkeypatch):
    """The first process belongs to somebody else, and nobody may look at it."""
    read = Path.read_bytes

    def agent_started(path):
        if path.parts[:3] == ("/", "proc", "1"):
            raise PermissionError(1, "Operation not permitted", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", agent_started)


@pytest.mark.usefixtures("hidden")
def test_a_process_that_we_may_not_see_is_not_there():
    assert processes.find(1) is None
    assert not processes.is_alive(1, 1)
    assert os.getpid() in {process.pid for process in processes.every_process()}
    assert processes.descendants(os.getpid()) is not None
    assert ProcessId.of(1) is None
    assert os.getpid() in processes.members(os.getpid())


@pytest.mark.usefixtures("hidden")
def test_what_is_left_can_be_told_all_the_same(tmp_path):
    record = {"pid": 1, "start_ticks": 1, "torchrun_pid": 1, "torchrun_start_ticks": 1}
    (tmp_path / "agent.json").write_text(str(record).replace("'", '"'))
    request = {"folder": str(tmp_path), "rank_files": str(tmp_path)}
    assert left_of([request], port=None)["processes"] == []


def test_a_family_is_the_session_and_all_descendants():
    program = "import subprocess, sys; subprocess.run(['sleep', '60'], start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            while len(processes.members(process.pid)) < 2:
                assert process.poll() is None
            members = processes.members(process.pid)
        finally:
            processes.end_family(process)
    assert process.pid in members
    assert not any(processes.is_alive(pid, ticks) for pid, ticks in members.items())
