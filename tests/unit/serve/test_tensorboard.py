"""TensorBoard of a run: at an address that nobody can guess."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from gangline.runs.cluster import Host
from gangline.serve import tensorboard
from gangline.serve.tensorboard import PATH_VARIABLE, SHOW, show_tensorboard
from tests.fakes.transport import FakeTransport, Scripted

HOST = Host(name="pc1", workdir="/w", python="/env/python", transport="ssh", code="/w/code")
ADDRESS = re.compile(r"http://127\.0\.0\.1:4711(/[A-Za-z0-9_-]{20,})/  \(no password: .* log in to pc1\)")


def show(monkeypatch: pytest.MonkeyPatch) -> tuple[str, FakeTransport]:
    transport = FakeTransport(
        "pc1", answer=lambda call: Scripted(stdout='{"port": 16006}' if "free-port" in call.argv else "")
    )
    said: list[str] = []
    monkeypatch.setattr(tensorboard, "forward", lambda _host, _port: contextlib.nullcontext(4711))
    monkeypatch.setattr(tensorboard, "_await", lambda _port, program, _host: program.join())
    show_tensorboard(HOST, transport, Path("/w/tb"), on_ready=said.append, wait=lambda: None)
    return said[0], transport


def test_the_address_cannot_be_guessed_nor_read_from_the_list_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    line, transport = show(monkeypatch)
    path = ADDRESS.fullmatch(line)[1]
    argv, env = transport.calls[1].argv, transport.calls[1].env
    assert env == {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/w/code", PATH_VARIABLE: path}
    assert argv[:3] == ("/env/python", "-c", SHOW)
    assert not any(path[1:] in word for word in argv)
    assert show(monkeypatch)[0] != line
