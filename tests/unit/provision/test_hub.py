"""A config.json from the hub: fetched once, kept with its revision, and every refusal said in words."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gangline.provision import hub
from gangline.provision.hub import HubConfig, kept_or_fetched

CONFIG = {"model_type": "llama", "hidden_size": 64}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPLIES = {
    "o/gated": (403, {"X-Error-Code": "GatedRepo"}, b""),
    "o/secret": (401, {"X-Error-Code": "RepoNotFound"}, b""),
    "o/bare": (404, {"X-Error-Code": "EntryNotFound"}, b""),
    "o/gone": (404, {}, b"not here"),
    "o/broken": (500, {}, b"oops"),
    "o/page": (200, {}, b"<html>Please log in</html>"),
    "o/list": (200, {}, b"[1, 2]"),
    "o/deep": (200, {}, b"[" * 100_000),
    "o/huge": (200, {}, b"{" + b" " * (1 << 20)),
    "o/moved": (307, {"Location": "/o/model/resolve/main/config.json"}, b""),
    "o/away": (302, {"Location": "ftp://127.0.0.1/passwd"}, b""),
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        name, _, rest = self.path[1:].partition("/resolve/")
        if name == "o/slow":
            self.server.go_on.wait(30)
        status, headers, body = REPLIES.get(name, (200, {"X-Repo-Commit": COMMIT}, json.dumps(CONFIG).encode()))
        if rest.startswith("nowhere/"):
            status, headers, body = 404, {"X-Error-Code": "RevisionNotFound"}, b""
        try:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # who asked has gone
            pass

    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.go_on = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(served, tmp_path):
    def of(name, revision=None, **variables):
        known = {"HF_ENDPOINT": f"http://127.0.0.1:{served.server_port}/", "HOME": str(tmp_path / "user")}
        return kept_or_fetched(name, revision, {**known, **variables}, tmp_path / "home")

    return of


def forget_the_command():
    """What the next command does not know."""
    hub._ask.cache_clear()


def test_it_is_fetched_once_and_kept_with_its_revision(ask, served, tmp_path):
    first = ask("o/model")
    assert isinstance(first, HubConfig)
    assert (first.config, first.revision, first.fetched) == (CONFIG, COMMIT, True)
    assert first.num_bytes == len(json.dumps(CONFIG))
    forget_the_command()
    again = ask("o/model")
    assert isinstance(again, HubConfig)
    assert (again.config, again.revision, again.fetched) == (CONFIG, COMMIT, False)
    assert served.seen == [("/o/model/resolve/main/config.json", None)]
    (kept,) = (tmp_path / "home").rglob("*.json")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_another_revision_or_endpoint_is_another_question(ask, served):
    ask("o/model")
    ask("o/model", "v2/b")
    assert served.seen[-1][0] == "/o/model/resolve/v2%2Fb/config.json"
    answer = ask("o/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert isinstance(answer, str)
    assert "127.0.0.1:9" in answer


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "GANGLINE_OFFLINE"])
def test_a_hub_that_is_switched_off_is_never_asked(ask, served, variable):
    answer = ask("o/model", **{variable: "1"})
    assert answer == f"the hub was not asked ({variable}=1)"
    assert served.seen == []
    ask("o/model", **{variable: "0"})
    forget_the_command()
    kept = ask("o/model", **{variable: "YES"})
    assert isinstance(kept, HubConfig)
    assert len(served.seen) == 1


@pytest.mark.parametrize(
    ("name", "revision", "word"),
    [
        ("o/gated", None, "accept its terms"),
        ("o/secret", None, "HF_TOKEN"),
        ("o/bare", None, "no config.json"),
        ("o/gone", None, "no model o/gone"),
        ("o/model", "nowhere", "no revision nowhere"),
        ("o/broken", None, "answered 500"),
        ("o/page", None, "no config.json"),
        ("o/list", None, "no config.json"),
        ("o/deep", None, "no config.json"),
        ("o/huge", None, "larger than 1 MB"),
        ("o/away", None, "answered 302"),
    ],
)
def test_every_refusal_is_said_in_words_and_asked_once_per_command(ask, served, tmp_path, name, revision, word):
    answer = ask(name, revision)
    assert isinstance(answer, str)
    assert word in answer
    assert f"127.0.0.1:{served.server_port}" in answer
    assert ask(name, revision) == answer
    assert len(served.seen) == 1
    assert not list(tmp_path.rglob("*.json"))


def test_an_answer_that_does_not_come_is_not_waited_for(ask, monkeypatch):
    monkeypatch.setattr(hub, "LIMIT_S", 0.2)
    begin = time.monotonic()
    answer = ask("o/slow")
    assert time.monotonic() - begin < 10
    assert "did not answer in 0.2 s" in answer or "timed out" in answer


def test_a_token_goes_to_the_hub_and_to_nobody_else(ask, served, tmp_path):
    ask("o/moved", HF_TOKEN="hf_a")
    assert [token for _, token in served.seen] == ["Bearer hf_a"] * 2
    login = tmp_path / "user" / ".cache" / "huggingface" / "token"
    login.parent.mkdir(parents=True)
    login.write_text("hf_b\n", encoding="utf-8")
    ask("o/other")
    assert served.seen[-1][1] == "Bearer hf_b"
    elsewhere = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    elsewhere.seen = []
    thread = threading.Thread(target=elsewhere.handle_request)
    thread.start()
    REPLIES["o/elsewhere"] = (302, {"Location": f"http://127.0.0.1:{elsewhere.server_port}/o/model/x"}, b"")
    ask("o/elsewhere", HF_TOKEN="hf_a")
    thread.join()
    elsewhere.server_close()
    assert elsewhere.seen == [("/o/model/x", None)]


@pytest.mark.parametrize("name", ["", "../x", "a/b/c", "o/..", "o/m?x", "/models/x", "o/a..b", "-o/m"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(ask, served, name):
    assert "no name of the hub" in ask(name)
    assert served.seen == []


def test_an_endpoint_that_is_no_address_is_said(ask):
    assert "HF_ENDPOINT" in ask("o/model", HF_ENDPOINT="file:///etc")


def test_a_home_that_cannot_be_written_costs_nothing_but_the_next_question(ask, tmp_path):
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    assert isinstance(ask("o/model"), HubConfig)
