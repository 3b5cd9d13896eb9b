"""A supervisor that is gone is started again by the host agent beside it."""

import fcntl
import json
import os
import sys

import pytest

from gangline.agent.supervise import processes
from gangline.agent.supervise.detach import MOST, Revive
from tests.waiting import wait_until

STAND_IN = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
said = {"secrets": json.load(sys.stdin)["secrets"], "parent": os.getppid(), "word": os.environ["WORD"]}
said["descriptors"] = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]
(folder / "part").write_text(json.dumps(said))
(folder / "part").rename(folder / "said")
"""


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Run:
    """A run's folder, and the host agent's eye on it."""

    def __init__(self, folder, argv=None):
        self.folder = folder
        self.clock = Clock()
        self.complaints = []
        self.say("running")
        argv = argv or [sys.executable, "-c", STAND_IN, str(folder)]
        words = {"argv": argv, "env": {"WORD": "fox"}, "folder": str(folder)}
        self.revive = Revive(words, secrets={"HF_TOKEN": "x"}, complain=self.complaints.append, clock=self.clock)

    def say(self, phase):
        (self.folder / "state.json").write_text(json.dumps({"phase": phase}))

    def look(self, seconds):
        for _ in range(seconds):
            self.revive.look()
            self.clock.now += 1

    def said(self):
        wait_until((self.folder / "said").exists, "it has come up")
        return json.loads((self.folder / "said").read_text())


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_one_that_is_missed_is_started_again_as_nobodys_child(run):
    held = os.open(run.folder / "slot", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(held, True)
    run.look(5)
    os.close(held)
    said = run.said()
    assert (said["secrets"], said["word"]) == ({"HF_TOKEN": "x"}, "fox")
    assert said["parent"] != os.getpid()
    assert len(said["descriptors"]) <= 1  # that of the listing itself
    assert run.complaints == ["the supervisor is gone; starting it again"]


def test_not_at_once(run):
    run.look(3)
    assert run.complaints == []


def test_nor_while_it_lives(run):
    lock = os.open(run.folder / "supervisor.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    run.look(30)
    os.close(lock)
    assert run.complaints == []


@pytest.mark.parametrize("phase", ["finished", "stopped", "failed", "preparing"])
def test_nor_for_a_run_that_needs_none(run, phase):
    run.say(phase)
    run.look(30)
    assert run.complaints == []


def test_nor_where_its_state_cannot_be_read(run):
    (run.folder / "state.json").write_text("{")
    run.look(30)
    assert run.complaints == []


def test_one_that_never_comes_up_is_not_started_for_ever(tmp_path):
    run = Run(tmp_path, ["/bin/false"])
    run.look(2000)
    assert run.complaints == ["the supervisor is gone; starting it again"] * MOST


def test_a_program_that_is_not_there_is_no_harm(tmp_path):
    run = Run(tmp_path, [str(tmp_path / "nothing")])
    run.look(5)
    assert run.complaints == ["the supervisor is gone; starting it again"]


def test_no_child_is_left_behind(run):
    run.look(5)
    run.said()
    children = [each for each in processes.every_process() if each.parent == os.getpid()]
    assert [each for each in children if each.state == "Z"] == []
