"""The agent within the process of the tests: a process of its own costs a fifth of a second, and there are hundreds."""

from __future__ import annotations

import contextlib
import io
import sys
import threading

import pytest

from gangline.agent.__main__ import load
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT, CommandResult

_turn = threading.Lock()
_run_process = LocalTransport.run


def _run(self, argv, *, stdin=b"", on_line=None, **options):
    if argv[0] != AGENT:
        return _run_process(self, argv, stdin=stdin, on_line=on_line, **options)
    out, errors = io.StringIO(), io.StringIO()
    with _turn, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        before, sys.stdin = sys.stdin, io.StringIO(stdin.decode())
        try:
            code = load(list(argv[1:]))(list(argv[2:]))
        finally:
            sys.stdin = before
    for line in out.getvalue().splitlines() if on_line else ():
        on_line(line)
    return CommandResult(
        host=self.host, argv=tuple(argv), returncode=code, stdout=out.getvalue(), stderr=errors.getvalue()
    )


@pytest.fixture(autouse=True)
def agent_here(request, monkeypatch):
    if "real_agent" not in request.fixturenames:
        monkeypatch.setattr(LocalTransport, "run", _run)


@pytest.fixture
def real_agent():
    """The agent is a program, as ever."""
