"""The channel on a host: what it refuses, when it leaves, and what it takes along."""

import contextlib
import errno
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.agent.__main__ import ANSWERS, PROGRAMS
from gangline.agent.rpc.command import Forked
from gangline.agent.rpc.wire import END
from gangline.runs.state import ProcessId
from gangline.transport.channel import MAGIC
from tests.waiting import wait_until


class Peer:
    """A controller that says what a test wants."""

    def __init__(self, *argv, env=None):
        self.process = subprocess.Popen(
            argv or [sys.executable, "-m", "gangline.agent", "channel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout.read(len(MAGIC)) == MAGIC
        self.hello = self.hear()[0]["hello"]

    def say(self, header, data=b""):
        words = json.dumps(header).encode()
        self.raw(struct.pack("!II", len(words), len(data)) + words + data + END)

    def raw(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def hear(self):
        json_length, data_length = struct.unpack("!II", self.process.stdout.read(8))
        header, data = json.loads(self.process.stdout.read(json_length)), self.process.stdout.read(data_length)
        assert self.process.stdout.read(len(END)) == END
        return header, data

    def close(self):
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self.process.wait(20)  # it takes along what it has started
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


def sleeper(number=1, **more):
    program = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    argv = [sys.executable, "-S", "-c", program]
    return {"id": number, "op": "run", "argv": argv, "env": {}, "timeout_s": 600, "in": False, **more}


def test_it_says_where_and_who_it_is(peer):
    assert peer.hello["hostname"] == os.uname().nodename
    assert peer.hello["uid"] == os.getuid()
    assert peer.hello["home"] == str(Path.home())
    assert peer.hello["python"] == ".".join(map(str, sys.version_info[:3]))
    assert peer.hello["pid"] == peer.process.pid


def test_it_answers_a_ping(peer):
    peer.say({"id": 5, "op": "ping"})
    assert peer.hear() == ({"id": 5, "end": True}, b"")


def test_what_it_does_not_know_is_an_answer_not_an_end(peer):
    peer.say({"id": 1, "op": "dance"})
    assert peer.hear()[0] == {"id": 1, "end": True, "error": "ValueError: no operation is called 'dance'"}
    peer.say({"id": 2, "op": "read"})
    assert "KeyError" in peer.hear()[0]["error"]


def test_files_are_for_their_owner_whatever_the_login_says(peer, tmp_path):
    peer.say({"id": 1, "op": "write", "path": str(tmp_path / "a" / "b"), "in": False}, b"x")
    assert peer.hear()[0] == {"id": 1, "end": True}
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    argv = ["sh", "-c", "umask"]
    peer.say({"id": 2, "op": "run", "argv": argv, "env": {}, "timeout_s": 9, "in": False})
    assert peer.hear()[1] == b"0077\n"


def test_a_command_gets_its_folder(peer, tmp_path):
    peer.say({"id": 2, "op": "run", "argv": ["pwd"], "env": {}, "timeout_s": 9, "cwd": str(tmp_path), "in": False})
    assert peer.hear()[1].decode() == f"{tmp_path}\n"


@pytest.mark.parametrize(
    "words",
    [
        struct.pack("!II", 1 << 30, 0),
        struct.pack("!II", 2, 1 << 30),
        struct.pack("!II", 4, 0) + b"nope",
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 2, 0) + b"{}",
        struct.pack("!II", 60000, 0) + b"[" * 60000,
        struct.pack("!II", 8, 1) + b'{"id":1}' + b"xx",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_it_leaves_where_nobody_speaks_its_protocol(peer, words):
    peer.say(sleeper())
    pid = int(peer.hear()[1])
    peer.raw(words)
    if words.startswith(b"GET"):
        peer.process.stdin.close()
    assert peer.process.wait(20) == 0
    assert ProcessId.of(pid) is None


def test_it_leaves_when_more_comes_than_it_has_room_for(peer):
    peer.say({**sleeper(), "in": True})
    peer.hear()
    with contextlib.suppress(BrokenPipeError):
        for _ in range(8):
            peer.say({"id": 1, "in": True}, b"x" * (1 << 18))
    assert peer.process.wait(20) == 0


def test_the_same_id_twice_is_refused(peer):
    peer.say(sleeper())
    peer.hear()
    peer.say(sleeper())
    assert peer.process.wait(20) == 0


@pytest.mark.parametrize("how", ["end", "terminate", "silence"])
def test_it_takes_along_what_runs_for_it(how):
    quick = "import sys; from gangline.agent.rpc import server; server.SILENCE_S = 0.5; server.main([])"
    peer = Peer(*([sys.executable, "-c", quick] if how == "silence" else []))
    peer.say(sleeper())
    pid = int(peer.hear()[1])
    if how == "end":
        peer.process.stdin.close()
    elif how == "terminate":
        peer.process.terminate()
    assert peer.process.wait(20) == 0
    assert ProcessId.of(pid) is None
    peer.close()


def test_it_takes_them_along_also_when_nobody_reads_what_they_say(tmp_path):
    """A dead connection that no one has noticed: the pipe is full, and writing would wait for ever."""
    quick = "import sys; from gangline.agent.rpc import server; server.SILENCE_S = 1.0; server.main([])"
    peer = Peer(sys.executable, "-c", quick)
    pids = tmp_path / "pids"
    pids.touch()
    for number in range(1, 5):
        program = f"echo $$ >> {pids}; exec yes"
        peer.say(sleeper(number, argv=["sh", "-c", program]))
    wait_until(lambda: len(pids.read_text().split()) == 4, "they run")
    assert peer.process.wait(30) == 0
    assert all(ProcessId.of(int(pid)) is None for pid in pids.read_text().split())
    peer.close()


def test_a_cancelled_command_is_gone_when_the_answer_comes(peer):
    peer.say(sleeper())
    pid = int(peer.hear()[1])
    peer.say({"id": 1, "cancel": True})
    assert peer.hear()[0] == {"id": 1, "end": True, "cancelled": True}
    assert ProcessId.of(pid) is None


def test_a_command_stops_when_nobody_takes_its_output(peer):
    """A megabyte is under way, and no more, until it was taken."""
    peer.say(sleeper(argv=["yes"]))
    came = 0
    while came < 1 << 20:
        came += len(peer.hear()[1])
    assert came == 1 << 20
    peer.say({"id": 2, "op": "ping"})
    assert peer.hear()[0]["id"] == 2
    peer.say({"id": 1, "ack": 1000})
    header, data = peer.hear()
    assert (header["id"], len(data)) == (1, 1000)


NUMBERS = itertools.count(100)


def ask(peer, *words, stdin=b"", env=()):
    """Run a verb of the agent; its exit code, what it wrote to stdout and to stderr."""
    asked = {"op": "run", "argv": ["gangline-agent", *words], "agent": True, "env": dict(env), "timeout_s": 30}
    peer.say({"id": next(NUMBERS), "in": False, **asked}, stdin)
    written = b""
    while "end" not in (heard := peer.hear())[0]:
        written += heard[1]
    return heard[0]["returncode"], written, heard[1].decode()


def test_a_verb_has_its_own_streams_environment_and_session_and_no_other_descriptor(peer):
    program = (
        "import json, os; print(json.dumps([os.environ['COLOUR'], sorted(map(int, os.listdir('/proc/self/fd'))),"
        " os.getsid(0), os.getppid(), input()]))"
    )
    argv = [sys.executable, "-S", "-c", program]
    peer.say(sleeper(number=7))  # its pipes are nobody else's
    peer.hear()
    asked = json.dumps({"argv": argv, "seconds": 20}).encode()
    assert ask(peer, "attached", stdin=asked, env={"COLOUR": "gr\udce4n"})[0] == 1, "input() finds no input"
    program = program.replace(", input()", "")
    asked = json.dumps({"argv": [*argv[:-1], program], "seconds": 20}).encode()
    code, written, _ = ask(peer, "attached", stdin=asked, env={"COLOUR": "gr\udce4n"})
    assert code == 0
    colour, descriptors, session, parent = json.loads(written.splitlines()[-1])
    assert (colour, descriptors, session) == ("gr\udce4n", [0, 1, 2, 3], parent)
    assert parent != peer.process.pid


def test_a_verb_that_fails_says_why_and_harms_nobody(peer):
    code, written, complaint = ask(peer, "facts", stdin=b"{no json")
    assert (code, written) == (1, b"")
    assert "JSONDecodeError" in complaint
    code, _, complaint = ask(peer, "dance")
    assert code == 2
    assert complaint.startswith("usage: gangline.agent VERB")
    assert json.loads(ask(peer, "facts")[1])["system"]


def test_all_verbs_at_once_and_twice_are_answered(peer):
    """Children are born while the channel loads modules for others."""
    verbs = sorted({*PROGRAMS, *ANSWERS} - {"channel", "host-agent", "listen", "python"})
    for number, verb in enumerate([*verbs, "no-such-verb", *verbs], 1):
        argv = ["x", verb, "no", "such", "words"]
        peer.say(
            {"id": number, "op": "run", "argv": argv, "agent": True, "env": {}, "timeout_s": 60, "in": False}, b"{}"
        )
    answers = {}
    while len(answers) < 2 * len(verbs) + 1:
        header, data = peer.hear()
        if header.get("end"):
            answers[header["id"]] = header, data
    assert all("returncode" in header for header, _ in answers.values())
    header, said = answers[len(verbs) + 1]
    assert (header["returncode"], said[:6]) == (2, b"usage:")


def test_a_verb_that_was_killed_says_so(peer):
    words = {"op": "run", "argv": ["gangline-agent", "facts"], "agent": True, "env": {}, "timeout_s": 30}
    peer.say({"id": 2, "in": True, **words})  # it waits for the rest of its input
    tasks = Path(f"/proc/{peer.process.pid}/task")

    def children():
        return [int(pid) for path in tasks.glob("*/children") for pid in path.read_text().split()]

    wait_until(children, "it runs")
    os.kill(*children(), 9)
    assert peer.hear()[0] == {"id": 2, "end": True, "returncode": -9}


def test_where_no_process_can_be_started_nothing_stays_open(monkeypatch):
    def fork():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(BlockingIOError):
        Forked(lambda: 0, env={}, keep=())
    assert sorted(Path("/proc/self/fd").iterdir()) == before
