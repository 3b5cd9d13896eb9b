"""A rank of the user's own program has joined once it is connected, and until a connection gets no answer."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from gangline.agent.supervise import processes
from gangline.agent.supervise import ranks as signs
from gangline.agent.supervise.ranks import Ranks
from gangline.runs.state import ProcessId
from tests.waiting import wait_until

RANK = """
import socket, sys
meet = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
for line in sys.stdin:
    other = socket.socket()
    other.setblocking(False)
    other.connect_ex(("127.0.0.1", int(line)))
    print("calls", flush=True)
    if not sys.stdin.readline():
        break
    other.close()
    print("gave up", flush=True)
"""


class Gang:
    """One rank of the user's program, and what its host agent sees of it."""

    def __init__(self, folder, stack):
        self.stack = stack
        self.port = self.listen(5)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(self.process.communicate)
        assert self.process.stdout.readline() == "connected\n"
        (folder / "rank-0.pid").write_text(json.dumps(ProcessId.of(self.process.pid).to_json()))
        ranks = Ranks(folder, {0})
        ranks.scan(ordered=False)
        self.command = processes.find(self.process.pid)
        self.signs = signs.Signs({"meet": ["127.0.0.1", self.port], "program": "command", "ranks": [0]}, ranks)

    def listen(self, backlog):
        sock = self.stack.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        sock.listen(backlog)
        return sock.getsockname()[1]

    def silent_port(self):
        """A port whose queue is full, so that the kernel drops who else calls."""
        port = self.listen(0)
        for _ in range(3):
            client = self.stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        return port

    def say(self, word, expected):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{expected}\n"

    def look(self):
        self.signs.look(self.command)
        return self.signs.joined, self.signs.seen["waits_for"]


@pytest.fixture
def gang(tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "_has_torch", lambda _pid: True)
    with ExitStack() as stack:
        yield Gang(tmp_path, stack)


def test_it_has_joined_once_it_is_connected(gang):
    assert gang.look() == (True, [])


def test_it_has_not_while_it_calls_somebody(gang):
    gang.say(gang.silent_port(), "calls")
    assert gang.look() == (False, [])


def test_a_connection_without_answer_long_after_the_start_is_told_until_it_is_over(gang):
    assert gang.look() == (True, [])
    port = gang.silent_port()
    gang.say(port, "calls")
    assert gang.look() == (True, [])
    assert gang.look() == (False, [f"127.0.0.1:{port}"])
    gang.say("", "gave up")
    assert gang.look() == (True, [])


def test_what_it_wants_of_a_web_service_does_not_count(gang, monkeypatch):
    monkeypatch.setattr(signs, "OWN_PORTS", 65536)
    gang.look()
    gang.say(gang.silent_port(), "calls")
    assert [gang.look()[0], gang.look()[0]] == [True, True]


def test_other_programs_on_the_host_do_not_count(gang):
    gang.look()
    gang.silent_port()  # callers of our own
    assert [gang.look(), gang.look()] == [(True, []), (True, [])]


PHASE = struct.Struct("<qqqd")
"""As the worker writes it: step, phase, collectives, time."""


class Worker:
    """One rank of our own, which tells in which phase it is."""

    def __init__(self, folder, **request):
        self.now = 50.0
        (folder / "rank-0.pid").write_text(json.dumps(ProcessId.current().to_json()))
        self.path = folder / "rank-0.phase"
        ranks = Ranks(folder, {0})
        ranks.scan(ordered=False)
        self.signs = signs.Signs({"ranks": [0], **request}, ranks, clock=lambda: self.now)

    def say(self, step, phase, collectives, when):
        self.path.write_bytes(PHASE.pack(step, phase, collectives, when))

    def row(self, seconds):
        self.now += seconds
        self.signs.look(processes.find(os.getpid()))
        return self.signs.seen["ranks"]["0"]


def test_how_long_a_rank_has_been_where_it_is_is_told_also_after_all_have_joined(tmp_path):
    worker = Worker(tmp_path)
    worker.say(7, 5, 20, 1.0)
    assert worker.row(0) == {
        "torch": True,
        "met": False,
        "phase": "exchange",
        "step": 7,
        "collectives": 20,
        "same_s": 0,
        "starved_s": 0.0,
        "work": None,
    }
    assert worker.signs.joined
    assert worker.row(1.5)["same_s"] == 1.5
    assert worker.row(10)["same_s"] == 11.5
    worker.say(7, 5, 20, 2.0)  # it says the same anew: that is a sign of life
    assert worker.row(1)["same_s"] == 0
    worker.say(7, 5, 21, 2.0)
    assert (worker.row(1)["same_s"], worker.row(1)["collectives"]) == (0, 21)


def test_of_a_rank_without_a_phase_nothing_is_told(tmp_path):
    row = Worker(tmp_path).row(1)
    assert (row["phase"], row["step"], row["collectives"], row["same_s"]) == (None, None, None, None)


def test_a_rank_that_reports_has_imported_what_it_needs_once_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "_has_torch", lambda _pid: True)  # its library is mapped long before
    worker = Worker(tmp_path)
    worker.say(0, 0, 0, 1.0)
    assert not worker.row(1)["torch"]
    worker.say(0, 1, 0, 2.0)
    assert worker.row(1)["torch"]


def test_whether_a_rank_works_or_sleeps_is_seen_until_it_has_joined(tmp_path):
    worker = Worker(tmp_path)
    assert worker.row(1)["work"]["idle_s"] == 0
    assert worker.row(30)["work"]["idle_s"] == 30
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    assert worker.row(1)["work"]["idle_s"] == 0
    assert worker.signs.seen["load"] >= 0
    worker.say(0, 2, 0, 1.0)
    assert worker.row(1)["work"] is None


def test_a_launcher_that_is_alone_has_nobody_to_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "_has_torch", lambda _pid: True)
    for alone in (True, False):
        (tmp_path / str(alone)).mkdir()
        ranks = Ranks(tmp_path / str(alone), {0})
        seen = signs.Signs({"ranks": [0], "meet": ["127.0.0.1", 1], "alone": alone}, ranks)
        seen.look(processes.find(os.getpid()))
        assert (seen.seen["launcher"], seen.seen["met"]) == (True, alone)


SPIN = "import os\nos.sched_setaffinity(0, {{{}}})\nos.nice({})\nwhile True:\n    pass\n"


@contextlib.contextmanager
def spinning(*nice):
    """Processes that want one processor, all the same one."""
    core = min(os.sched_getaffinity(0))
    made = [subprocess.Popen([sys.executable, "-c", SPIN.format(core, each)]) for each in nice]
    try:
        yield made
    finally:
        for each in made:
            each.kill()
            each.wait()


def starved(tmp_path, process, seconds):
    """For how long a rank in that process was starved, and for how long it was looked at."""
    worker = Worker(tmp_path)
    (tmp_path / "rank-0.pid").write_text(json.dumps(ProcessId.of(process.pid).to_json()))
    ranks = Ranks(tmp_path, {0})
    ranks.scan(ordered=False)
    worker.signs = signs.Signs({"ranks": [0]}, ranks)
    worker.say(7, 4, 20, 1.0)
    begun = time.monotonic()
    while worker.row(0)["same_s"] < seconds:
        time.sleep(0.5)
    return worker.row(0)["starved_s"], time.monotonic() - begun - signs.STAYS_S


def test_a_rank_that_gets_no_processor_is_starved(tmp_path):
    with spinning(19, 0, 0, 0) as made:
        seen_s, passed_s = starved(tmp_path, made[0], 6)
    assert seen_s > passed_s / 2


def test_a_rank_that_was_stopped_is_not_however_busy_the_processor_is(tmp_path):
    with spinning(19, 0, 0, 0) as made:
        made[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: processes.find(made[0].pid).state == "T", "it is stopped")
        seen_s, _ = starved(tmp_path, made[0], 5)
    assert seen_s < 0.5
