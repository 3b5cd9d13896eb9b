"""Messages about a run reach local sinks: each event once, none lost where its supervisor is killed."""

from __future__ import annotations

import json
import os
import signal
import smtplib
import socket
import socketserver
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState, append_event
from gangline.supervise.detached import spawn
from gangline.supervise.lock import has_supervisor
from gangline.supervise.messages import KINDS
from gangline.supervise.sinks import SinkAddresses
from tests.process.launch.gang import kill_left, let_go, part, rank_pid, request
from tests.unit.supervise.runs import cluster_of, create_run
from tests.waiting import wait_until
from tests.web_sink import WebSink, web

__all__ = ["web"]

COURIER = """
import sys, time
from pathlib import Path
from gangline.runs.layout import RunLayout
from gangline.supervise import messages
messages.PAUSE_S = messages.LONGEST_PAUSE_S = 0.1
layout = RunLayout.of(Path(sys.argv[1]))
courier = messages.Courier(layout)
courier.start()
while not (layout.folder / "over").exists():
    time.sleep(0.05)
courier.finish()
"""
ALL = tuple(sorted(set(KINDS.values())))


class Led:
    """A run of which only the events are there, and the process that sends its messages."""

    def __init__(self, root: Path, **addresses: Any) -> None:
        self.layout = RunLayout(root, "calm-otter-7")
        self.layout.folder.mkdir(parents=True)
        RunState(name="tiny", phase="running").save(self.layout)
        SinkAddresses(**{"events": ALL, **addresses}).save(self.layout.sinks)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", COURIER, str(self.layout.folder)])

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def event(self, name: str, **details: Any) -> None:
        append_event(self.layout.events, name, source="supervisor", attempt=1, **details)

    def end(self) -> int:
        assert self.process is not None
        (self.layout.folder / "over").touch()
        return self.process.wait(timeout=60)


@pytest.fixture
def led(tmp_path: Path):
    begun: list[Led] = []

    def make(**addresses: Any) -> Led:
        begun.append(Led(tmp_path / str(len(begun)), **addresses))
        return begun[-1]

    yield make
    for each in begun:
        if each.process is not None and each.process.poll() is None:
            each.kill()


def plant(run: Led, count: int) -> None:
    for number in range(count):
        name = ("unreachable", "reachable", "straggler", "hanging", "committed")[number % 5]
        run.event(name, host=f"pc{number}", what=f"cause {number}")


def test_thirty_planted_events_arrive_once_with_their_cause_and_host(led, web) -> None:
    run = led(urls=(web.url,))
    run.start()
    plant(run, 36)
    run.event("failed", what="rank 2 on pc3 was killed by SIGKILL", why="the job says so")
    assert run.end() == 0
    told = Counter(each["event"] for each in web.got)
    assert told == {"lost": 8, "back": 7, "straggler": 7, "stalled": 7, "failed": 1}
    assert len(set(web.keys())) == 30
    assert {(each["host"], each["what"]) for each in web.got if each["event"] == "lost"} == {
        (f"pc{number}", f"cause {number}") for number in range(0, 36, 5)
    }
    last = web.got[-1]
    assert "rank 2 on pc3 was killed by SIGKILL" in last["text"]
    assert last["next"] == "gangline explain calm-otter-7"
    assert not any(each["repeat"] for each in web.got)
    assert not run.layout.sinks.exists()
    assert "of-nobody-9" not in "".join(
        path.read_text(encoding="utf-8") for path in run.layout.folder.iterdir() if path.is_file()
    )


def test_none_is_lost_where_the_supervisor_is_killed_and_a_repeat_says_so(led, web) -> None:
    run, kills = led(urls=(web.url,)), int(os.environ.get("GANGLINE_KILLS", "6"))
    web.answer_after_s = 0.3  # most kills meet a message on its way
    for number in range(kills):
        run.event("straggler", host=f"pc{number}", what=f"cause {number}")
        before = len(web.got)
        run.start()
        wait_until(lambda before=before: len(web.got) > before, "a message is on its way")
        run.kill()
    web.answer_after_s = 0.0
    run.start()
    run.event("finished")
    assert run.end() == 0
    assert len(set(web.keys())) == kills + 1
    repeats = len(web.got) - len(set(web.keys()))
    assert repeats <= kills
    first: set[str] = set()
    for each in web.got:
        assert each["repeat"] is (each["key"] in first)
        first.add(each["key"])


def test_a_sink_that_hangs_delays_neither_the_others_nor_the_run(led, web) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        run = led(urls=(f"http://127.0.0.1:{hangs.getsockname()[1]}/", web.url))
        run.start()
        plant(run, 4)
        wait_until(lambda: len(web.got) == 4, "the other sink has all")
        assert run.process.poll() is None


def test_what_waits_while_the_uplink_is_down_arrives_in_order(led) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    run = led(urls=(f"http://127.0.0.1:{port}/",))
    run.start()
    plant(run, 4)
    wait_until(lambda: b"notify-failed" in run.layout.events.read_bytes(), "it tells that a sink does not answer")
    sink = WebSink(port)
    try:
        wait_until(lambda: len(sink.got) == 4, "all have arrived")
        assert [each["what"] for each in sink.got] == [f"cause {number}" for number in range(4)]
        told = run.layout.events.read_text(encoding="utf-8")
        assert told.count("notify-failed") == 1
        assert "sink 1 of notify (URLError)" in told
    finally:
        sink.close()


def test_the_end_is_told_once_though_two_supervisors_write_it(led, web) -> None:
    run = led(urls=(web.url,))
    run.event("finished")
    run.event("finished")
    run.start()
    assert run.end() == 0
    assert web.keys() == ["calm-otter-7-finished-1"]


def test_only_wanted_kinds_since_the_last_start_are_told(led, web) -> None:
    run = led(urls=(web.url,), events=("failed", "lost"), since=2)
    plant(run, 5)
    append_event(run.layout.events, "unreachable", source="supervisor", attempt=2, host="pc9", why="no answer for 6 s")
    append_event(run.layout.events, "straggler", source="worker", attempt=2, host="pc9", what="slow")
    run.start()
    assert run.end() == 0
    assert [(each["host"], each["what"]) for each in web.got] == [("pc9", "no answer for 6 s")]


def test_a_program_gets_the_text_and_the_figures(led, tmp_path: Path) -> None:
    script = 'cat > "$0.text"; printf %s "$GANGLINE_MESSAGE" > "$0.json"'
    run = led(command=("sh", "-c", script, str(tmp_path / "told")))
    run.event("straggler", host="pc2", what="pc2 computes 2 x as slowly\x1b[31m as before")
    run.start()
    assert run.end() == 0
    text = (tmp_path / "told.text").read_text(encoding="utf-8")
    assert text.startswith("calm-otter-7 (tiny) is slowed down\npc2 computes 2 x as slowly")
    assert "\x1b" not in text
    assert json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))["host"] == "pc2"


def test_a_run_that_fails_tells_it_though_its_supervisor_was_killed_before(tmp_path: Path, web) -> None:
    parts = [
        part(tmp_path, host, f"{rank}={mode}")
        for rank, (host, mode) in enumerate({"pc1": "fail:boom", "pc2": "plain"}.items())
    ]
    layout = create_run(tmp_path, cluster_of(tmp_path, "pc1", "pc2"), request(*parts))
    SinkAddresses(urls=(web.url,), events=ALL).save(layout.sinks)
    try:
        spawn(layout.folder, 1)
        for rank, host in enumerate(parts):
            rank_pid(host, rank)
        first = RunState.load(layout).supervisor
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: not first.is_alive, "the supervisor is gone")
        spawn(layout.folder, 1)
        let_go(parts[0], 0)
        wait_until(lambda: RunState.load(layout).phase == "failed", "the run ends")
        (told,) = [each for each in web.got if each["event"] == "failed"]  # told before the state says so
        assert "boom" in told["what"]
        assert (told["key"], told["attempt"], told["repeat"]) == (f"{layout.run_id}-failed-1", 1, False)
        wait_until(lambda: not has_supervisor(layout) and not layout.sinks.exists(), "the supervisor leaves")
        assert len(web.keys()) == len(set(web.keys()))
    finally:
        state = RunState.load(layout)
        if state.supervisor is not None and state.supervisor.is_alive:
            os.kill(state.supervisor.pid, signal.SIGKILL)
        kill_left(*parts)


class Mails(socketserver.StreamRequestHandler):
    """As much of SMTP as a mail needs."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        for line in self.rfile:
            word = line[:4].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                mail = b""
                while (row := self.rfile.readline()) not in {b".\r\n", b""}:
                    mail += row
                self.server.mails.append(mail.decode())  # type: ignore[attr-defined]
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")


def test_a_mail_arrives_through_apprise(led) -> None:
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'gangline[notify]'")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mails) as server:
        server.mails = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with smtplib.SMTP("127.0.0.1", port) as probe:
            assert probe.noop()[0] == 250
        run = led(urls=(f"mailto://127.0.0.1:{port}?from=run@example.org&to=alice@example.org&mode=insecure",))
        run.start()
        run.event("finished")
        assert run.end() == 0
        server.shutdown()
        (mail,) = server.mails  # type: ignore[attr-defined]
    assert "calm-otter-7 (tiny) has finished" in mail
    assert "gangline summary calm-otter-7" in mail
