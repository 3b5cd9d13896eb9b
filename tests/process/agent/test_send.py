"""A folder sent from host to host: what ssh is told, and what is left of it when it takes too long."""

import json
import os
import sys
from pathlib import Path

import pytest

from gangline.agent.provision import send
from gangline.runs.state import ProcessId
from gangline.transport.ssh_options import FIXED
from tests.waiting import wait_until

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIG"
SLOW = """#!{python}
import json, os, subprocess, sys
nothing = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
child = subprocess.Popen(["sleep", "60"], **nothing)  # as ssh
open({place!r}, "w").write(json.dumps(child.pid))
child.wait()
"""


def request(folder, kind="ssh-ed25519", timeout_s=30.0):
    peer = {"name": "pc2", "user": "anna", "address": "10.0.0.2", "port": 22, "host_key": f"{kind} {KEY}"}
    return {"folder": str(folder), "names": [], "target": "/srv/model", "timeout_s": timeout_s, "peer": peer}


def options(monkeypatch, *, version, kind="ssh-ed25519"):
    monkeypatch.setattr(send, "_ssh_version", lambda: version)
    words = send.rsync_argv(request("/srv/model", kind), Path("/srv/private"))
    (rsh,) = [word for word in words if word.startswith("--rsh=")]
    return rsh.split()


@pytest.mark.parametrize(
    ("kind", "algorithms"), [("ssh-ed25519", "ssh-ed25519"), ("ssh-rsa", "rsa-sha2-512,rsa-sha2-256")]
)
def test_the_way_from_host_to_host_is_as_strict_as_the_one_from_here(monkeypatch, kind, algorithms):
    said = options(monkeypatch, version=(9, 6), kind=kind)
    wanted = {each for each in FIXED if not each.startswith(("ConnectTimeout", "ServerAlive"))}
    assert wanted <= set(said)
    assert {"ClearAllForwardings=yes", "KnownHostsCommand=none", f"HostKeyAlgorithms={algorithms}"} <= set(said)


def test_an_ssh_that_does_not_know_an_option_is_not_told_it(monkeypatch):
    assert "KnownHostsCommand=none" not in options(monkeypatch, version=(8, 2))


def test_what_takes_too_long_is_ended_with_its_ssh(monkeypatch, tmp_path):
    place = tmp_path / "child"
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("rsync", SLOW.format(python=sys.executable, place=str(place))), ("ssh", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    said = send.send(request(tmp_path, timeout_s=2.0))
    assert said == {"kind": "result", "sent": False, "why": "rsync ended with exit code -9"}
    child = json.loads(place.read_text())
    wait_until(lambda: ProcessId.of(child) is None, "its ssh is gone")


def test_why_it_was_refused_is_what_ssh_says_without_the_echo_of_rsync(monkeypatch, tmp_path):
    refusal = "anna@10.0.0.2: Permission denied (publickey)."
    echoes = "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\\nrsync error: (code 255)"
    for name, text in (
        ("rsync", f"#!/bin/sh\nprintf '{refusal}\\n{echoes}\\n' >&2\nexit 255\n"),
        ("ssh", "#!/bin/sh\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert send.send(request(tmp_path)) == {"kind": "result", "sent": False, "why": refusal}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert send.send(request(tmp_path)) == {"kind": "result", "sent": False, "why": "it has no rsync and no ssh"}
