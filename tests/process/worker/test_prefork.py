"""Promise: a host's processes outlive an attempt, and nothing of them outlives their end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.runs.files import write_json
from tests.process.launch.gang import is_running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
ENDED_S = 20


class Process:
    """A prefork process, with what a host agent would do for it."""

    def __init__(self, folder):
        self.folder = folder
        self.control = folder / "prefork"
        self.control.mkdir()
        self._popen = None

    def files(self, attempt):
        path = self.folder / str(attempt)
        path.mkdir(exist_ok=True)
        return path

    def start(self, mode, *, rank=0):
        self._popen = subprocess.Popen(self.argv(mode), cwd=ROOT, env={**os.environ, "RANK": str(rank)})
        return self

    def argv(self, mode):
        return [
            sys.executable,
            "-m",
            "tests.process.worker.prefork_process",
            str(self.control),
            str(self.files(1)),
            mode,
        ]

    def position(self, number, mode, *, ranks=(0,)):
        files = self.files(number)
        position = {
            "words": [str(files), mode],
            "ranks": list(ranks),
            "world_size": 3,
            "meet": ["10.0.0.1", 29500 + number],
            "files": str(files),
        }
        write_json(self.control / f"position-{number}.json", position)

    def here(self, attempt, *, rank=0):
        """What a rank says of itself, once it runs."""
        path = self.folder / str(attempt) / f"here-{rank}"
        wait_until(path.exists, f"the rank of attempt {attempt} runs")
        return json.loads(path.read_text())

    def ended(self, attempt, *, rank=0):
        """How a rank ended, once it has."""
        path = self.folder / str(attempt) / f"rank-{rank}.exit.json"
        wait_until(path.exists, f"the rank of attempt {attempt} ends")
        return json.loads(path.read_text())

    @property
    def pid(self):
        return self._popen.pid

    @property
    def runs(self):
        return self._popen.poll() is None

    def tell(self, name):
        (self.control / name).touch()

    def wait(self):
        return self._popen.wait(ENDED_S)

    def close(self):
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()


@pytest.fixture
def process(tmp_path):
    process = Process(tmp_path)
    yield process
    process.close()


def test_ranks_of_two_attempts_are_children_of_one_process(process):
    process.start("end:3", rank=1)
    first, ended = process.here(1, rank=1), process.ended(1, rank=1)
    assert (ended["pid"], ended["code"]) == (first["pid"], 3)
    process.position(2, "end:0", ranks=[2])
    second = process.here(2, rank=2)
    ended = process.ended(2, rank=2)
    assert (ended["pid"], ended["code"]) == (second["pid"], 0)
    assert first["parent"] == second["parent"] == process.pid
    assert first["pid"] != second["pid"]
    assert [second[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")] == ["3", "10.0.0.1", "29502"]
    assert process.wait() == 0


def test_the_first_position_may_be_told_by_the_host_agent_too(process):
    process.position(1, "end:0", ranks=[4])
    process.start("end:9")
    assert process.here(1, rank=4)["MASTER_PORT"] == "29501"
    assert process.ended(1, rank=4)["code"] == 0


def test_a_rank_that_ends_well_ends_it_unless_it_is_held(process):
    process.tell("hold")
    process.start("end:0")
    process.ended(1)
    process.position(2, "end:0")
    process.ended(2)
    assert process.runs
    process.tell("leave")
    assert process.wait() == 0


def test_a_position_that_is_given_before_the_hold_is_let_go_is_not_missed(process):
    process.position(2, "end:4")
    process.start("end:0")
    assert process.ended(2)["code"] == 4


def test_it_leaves_when_told_with_the_code_of_its_rank(process):
    process.start("end:42")
    process.ended(1)
    process.tell("leave")
    assert process.wait() == 42


def test_it_leaves_as_a_shell_would_after_a_rank_that_was_killed(process):
    process.start("stay")
    os.kill(process.here(1)["pid"], signal.SIGKILL)
    assert process.ended(1)["code"] == -signal.SIGKILL
    process.tell("leave")
    assert process.wait() == 128 + signal.SIGKILL


def test_sigterm_goes_to_the_rank_and_ends_both(process):
    process.start("stay")
    child = process.here(1)["pid"]
    os.kill(process.pid, signal.SIGTERM)
    ended = process.ended(1)
    assert (ended["pid"], ended["code"]) == (child, -signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def test_sigterm_ends_one_that_waits(process):
    process.start("end:3")
    process.ended(1)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 3


def test_an_order_to_break_that_reaches_it_is_passed_on_and_does_not_end_it(process):
    process.start("hear")
    process.here(1)
    os.kill(process.pid, signal.SIGUSR2)
    assert process.ended(1)["code"] == 5
    process.position(2, "end:0")
    assert process.ended(2)["code"] == 0


def test_a_rank_dies_with_its_process(process):
    process.start("stay")
    child = process.here(1)["pid"]
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(child), "the rank is gone")


ONE_THAT_LEAVES = """
import subprocess, sys
subprocess.Popen(sys.argv[1:])
sys.stdin.read()
"""


def test_it_does_not_wait_for_an_attempt_when_torchrun_is_gone(process):
    words = [sys.executable, "-c", ONE_THAT_LEAVES, *process.argv("end:3")]
    launcher = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "RANK": "0"}, stdin=subprocess.PIPE)
    pid = process.here(1)["parent"]
    process.ended(1)
    assert is_running(pid)
    launcher.communicate(b"")
    wait_until(lambda: not is_running(pid), "the process leaves")


def test_where_the_end_cannot_be_written_it_goes_on(process):
    process.start("stay")
    child = process.here(1)["pid"]
    (process.folder / "1").rename(process.folder / "gone")
    os.kill(child, signal.SIGKILL)
    process.position(2, "end:0")
    assert process.ended(2)["code"] == 0
