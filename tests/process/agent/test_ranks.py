"""What the files of ranks tell of prefork processes: who is the rank now, and how it ended."""

import json
import signal
import subprocess
import sys

import pytest

from gangline.agent.supervise import ranks
from gangline.agent.supervise.processes import find
from gangline.agent.supervise.ranks import Ranks
from gangline.runs.state import ProcessId
from tests.waiting import wait_until

WAITS = "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print(flush=True); input()"


@pytest.fixture
def process():
    """Start a process that waits, and ignores SIGTERM."""
    started = []

    def start():
        child = subprocess.Popen([sys.executable, "-c", WAITS], stdin=-1, stdout=-1)
        started.append(child)
        child.stdout.readline()
        return child

    yield start
    for child in started:
        child.communicate()


@pytest.fixture
def files(tmp_path):
    def write(name, value):
        (tmp_path / "part").write_text(json.dumps(value))
        (tmp_path / "part").rename(tmp_path / name)

    return write


def known(child):
    return ProcessId.of(child.pid).to_json()


def ended(child):
    child.kill()
    child.wait()


def test_a_rank_takes_the_place_of_its_prefork_process(tmp_path, files, process):
    seen = Ranks(tmp_path, {0}, preforked=True)
    first, second = process(), process()
    for child in (first, second):
        files("rank-0.pid", known(child))
        assert not seen.scan(ordered=False)
        assert seen.processes[0].pid == child.pid


def test_one_that_is_stopped_is_killed_and_one_that_runs_is_not(tmp_path, files, process):
    seen = Ranks(tmp_path, {0, 1}, preforked=False)
    stopped, runs = process(), process()
    for rank, child in enumerate((stopped, runs)):
        files(f"rank-{rank}.pid", known(child))
    seen.scan(ordered=False)
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: find(stopped.pid).state == "T", "it is stopped")
    seen.end_stopped()
    assert stopped.wait(timeout=20) == -signal.SIGKILL
    assert runs.poll() is None


def test_each_of_them_gets_a_signal_once(tmp_path, files, process, monkeypatch):
    told = []
    monkeypatch.setattr(ranks, "send", lambda process, number: told.append((process.pid, number)))
    seen = Ranks(tmp_path, {0}, preforked=True)
    first, second = process(), process()
    for child in (first, second):
        files("rank-0.pid", known(child))
        seen.scan(ordered=True)
        seen.terminate(signal.SIGTERM)
        seen.terminate(signal.SIGTERM)
    seen.terminate(signal.SIGUSR2)
    assert told == [(first.pid, 15), (second.pid, 15), (second.pid, signal.SIGUSR2)]


def test_a_bad_end_is_news_once_and_told_with_its_code(tmp_path, files, process):
    seen = Ranks(tmp_path, {0, 1}, preforked=True)
    child = process()
    files("rank-0.pid", known(child))
    seen.scan(ordered=False)
    ended(child)
    files("rank-0.exit.json", {"pid": child.pid, "code": -9})
    assert seen.scan(ordered=False)
    assert not seen.scan(ordered=True)
    (failure,) = seen.failures({})
    assert (failure["rank"], failure["pid"], failure["exit"], failure["ordered"]) == (0, child.pid, -9, False)
    assert (seen.are_gone, seen.codes) == (False, None)


def test_a_rank_that_has_told_its_error_has_not_ended_before_it_is_gone(tmp_path, files, process):
    seen = Ranks(tmp_path, {0}, preforked=True)
    child = process()
    files("rank-0.pid", known(child))
    files("rank-0.error.json", {"what": "no space left"})
    assert seen.scan(ordered=False)
    assert not seen.are_gone
    ended(child)
    assert (seen.are_gone, seen.codes) == (True, None)
    files("rank-0.exit.json", {"pid": child.pid, "code": 5})
    assert seen.scan(ordered=False)
    assert (seen.codes, seen.failures({})[0]["exit"]) == ([5], 5)


def test_a_good_end_is_no_news_and_no_failure(tmp_path, files, process):
    seen = Ranks(tmp_path, {0}, preforked=True)
    child = process()
    files("rank-0.pid", known(child))
    seen.scan(ordered=False)
    ended(child)
    files("rank-0.exit.json", {"pid": child.pid, "code": 0})
    assert not seen.scan(ordered=False)
    assert (seen.failures({}), seen.codes) == ([], [0])


def test_a_rank_that_is_gone_without_a_code_is_news_after_a_moment(tmp_path, files, process, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    seen = Ranks(tmp_path, {0}, preforked=True)
    child = process()
    files("rank-0.pid", known(child))
    seen.scan(ordered=False)
    ended(child)
    assert not seen.scan(ordered=False)
    now[0] += ranks.EXIT_S
    assert seen.scan(ordered=True)
    (failure,) = seen.failures({})
    assert (failure["exit"], failure["ordered"]) == (None, False)  # as it was when it was first seen
    assert (seen.are_gone, seen.codes) == (True, None)


def test_the_end_of_the_process_that_stood_by_explains_that_of_its_rank(tmp_path, files, process):
    seen = Ranks(tmp_path, {0}, preforked=True)
    first, second = process(), process()
    for child in (first, second):
        files("rank-0.pid", known(child))
        seen.scan(ordered=False)
    ended(second)
    seen.scan(ordered=False, last=True)
    assert [failure["exit"] for failure in seen.failures({first.pid: -9})] == [-9]


def test_without_prefork_processes_an_exit_file_says_nothing(tmp_path, files, process):
    seen = Ranks(tmp_path, {0})
    files("rank-0.pid", known(process()))
    files("rank-0.exit.json", {"pid": 1, "code": 5})
    assert not seen.scan(ordered=False)
    assert seen.ended == {}
