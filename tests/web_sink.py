"""A web server on this computer that gets messages about runs."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class WebSink:
    """A web server that keeps what it gets; it may hang, or refuse."""

    def __init__(self, port: int = 0) -> None:
        self.got: list[dict[str, Any]] = []
        self.answer_after_s = 0.0
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Idempotency-Key"] == body["key"]
                sink.got.append(body)
                time.sleep(sink.answer_after_s)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/hook?token=of-nobody-9"

    def keys(self) -> list[str]:
        return [each["key"] for each in self.got]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web():
    sink = WebSink()
    yield sink
    sink.close()
