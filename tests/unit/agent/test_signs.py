"""A rank of the user's own program has joined once it is connected, and until a connection gets no answer."""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from gangline.agent import processes, signs
from gangline.agent.ranks import Ranks
from gangline.runs.process import ProcessId

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
    """One rank of the user's program, and what its guard sees of it."""

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
        door = self.stack.enter_context(socket.socket())
        door.bind(("127.0.0.1", 0))
        door.listen(backlog)
        return door.getsockname()[1]

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
