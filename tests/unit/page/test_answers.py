"""What the page's server does with runs that several requests use, long logs, and mistakes of its own."""

import asyncio
import json
import threading
import time
from pathlib import PurePath
from types import SimpleNamespace

import pytest

from gangline.page import live_run, run_logs
from gangline.page.routes import Answers, PageRequest
from gangline.page.run_logs import RunLogs
from gangline.report.tail import LogFile

RUN, OTHER = "amber-vole-1", "silent-brook-8"


class Opened:
    """A run that is open; its log may be read until it is closed."""

    def __init__(self, run_id, *, home, deps):
        self.id, self.looked_at = run_id, time.monotonic()
        self.record = SimpleNamespace(state=None)
        self.logs = SimpleNamespace(document=self.document)
        self.is_moved = False
        self.closed = threading.Event()

    def look(self):
        if self.closed.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")

    def is_elsewhere(self):
        return self.is_moved

    def close(self):
        self.closed.set()

    def document(self, attempt):
        self.meanwhile()
        self.look()
        return {"attempt": attempt}

    def meanwhile(self):
        """What other requests do while this one is answered."""


@pytest.fixture
def opened(monkeypatch):
    made = []

    def open_one(run_id, **more):
        made.append(Opened(run_id, **more))
        return made[-1]

    monkeypatch.setattr(live_run, "LiveRun", open_one)
    monkeypatch.setattr(live_run, "run_ids", lambda home: [RUN, OTHER])
    return made


def logs_of(answers, run_id=RUN):
    return answers.read(PageRequest(path=f"/api/runs/{run_id}/logs", query={}))


def test_a_run_is_opened_once_for_all_requests(opened, tmp_path):
    answers = Answers(tmp_path)
    assert [logs_of(answers) for _ in range(3)] == [{"attempt": 1, "attempts": 1}] * 3
    assert len(opened) == 1


def test_a_run_that_others_forget_stays_open_until_its_answer_is_there(opened, tmp_path):
    answers = Answers(tmp_path)
    logs_of(answers)
    opened[0].meanwhile = lambda: answers.runs.forget(RUN)
    assert logs_of(answers)["attempt"] == 1
    assert opened[0].closed.wait(60), "its last user closes it"
    assert logs_of(answers)["attempt"] == 1
    assert (len(opened), opened[1].closed.is_set()) == (2, False)


def test_an_idle_run_is_closed_but_none_that_is_used(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "IDLE_S", -1.0)
    answers = Answers(tmp_path)
    logs_of(answers, OTHER)
    seen = []

    def meanwhile():
        logs_of(answers, OTHER)  # which looks for runs to close
        seen.append(opened[1].closed.is_set())

    monkeypatch.setattr(Opened, "meanwhile", lambda self: meanwhile() if self.id == RUN else None)
    assert logs_of(answers)["attempt"] == 1
    assert seen == [False]
    assert opened[0].closed.wait(60)


def test_a_run_on_other_hosts_is_opened_anew(opened, tmp_path):
    answers = Answers(tmp_path)
    logs_of(answers)
    opened[0].is_moved = True
    logs_of(answers)
    assert opened[0].closed.wait(60)
    assert (len(opened), opened[1].closed.is_set()) == (2, False)


# Long logs.

MIB = 1 << 20


class Pieces:
    """A host with one log, which is read half a MiB at a time."""

    def __init__(self, text):
        self.text = text

    def read(self, path, *, offset=0, limit=0):
        return self.text[offset : offset + MIB // 2]


@pytest.fixture
def long_log(monkeypatch):
    text = b"the first line\n" + (b"x" * 1023 + b"\n") * 1500 + b"the last line\n"
    file = LogFile(name="pc1 rank 0", rank=0, transport=Pieces(text), path=PurePath("rank-0.log"))
    monkeypatch.setattr(run_logs, "SEARCHED_BYTES", MIB)
    monkeypatch.setattr(RunLogs, "_files", lambda self, attempt: ([file], {}))
    return RunLogs(None)


def test_a_search_says_what_of_a_long_log_it_did_not_search(long_log, monkeypatch):
    told = long_log.search(1, "LINE")
    assert [row["text"] for row in told["found"]] == ["the first line"]
    assert told["missing"] == ["pc1 rank 0: nothing after its first 1 MiB was searched"]
    assert not told["is_all"]
    monkeypatch.setattr(run_logs, "SEARCHED_BYTES", 2 * MIB)
    told = long_log.search(1, "LINE")
    assert [row["line"] for row in told["found"]] == [1, 1502]
    assert (told["missing"], told["is_all"]) == ([], True)


def test_the_end_of_a_long_log_is_read_on_and_said_to_be_behind(long_log):
    told = long_log.end(1, "pc1 rank 0", after=None)
    assert (told["is_behind"], told["count"]) == (True, 1024)
    told = long_log.end(1, "pc1 rank 0", after=told["count"])
    assert (told["is_behind"], told["count"], told["lines"][-1]) == (False, 1502, "the last line")


# A mistake of its own.


def asked_of(app, path, headers):
    """Status, headers and body of one answer of an ASGI application."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "GET"}
    scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": raw}
    asyncio.run(app(scope, receive, send))
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, b"".join(message.get("body", b"") for message in sent[1:])


def test_an_error_that_nobody_expected_is_told_and_logged_with_all_headers(caplog):
    pytest.importorskip("starlette", reason="starlette is not installed: pip install 'gangline[ui]'")
    from gangline.page.web import HEADERS, PageKeys, make_app

    def fails(asked):
        raise RuntimeError("no \x1b[31msuch thing")

    keys = PageKeys()
    cookie = f"another=1; {keys.cookie_name}={keys.cookie}"
    app = make_app(SimpleNamespace(read=fails), keys)
    status, headers, content = asked_of(app, "/api/runs", {"host": "127.0.0.1:80", "cookie": cookie})
    error = json.loads(content)["error"]
    assert (status, error["what"]) == (500, "gangline ui could not answer this: there is a mistake in gangline")
    assert error["seen"].startswith("RuntimeError: no ")
    assert "\x1b" not in error["seen"]
    assert "report it" in error["fix"]
    assert {name: headers.get(name) for name in HEADERS} == HEADERS
    assert "Traceback" in caplog.text
