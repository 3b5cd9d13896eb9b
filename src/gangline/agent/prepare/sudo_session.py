"""A request as root: the agent runs itself once more through sudo, and hands the password over on its stdin alone.

sudo prints PROMPT when it wants the password, and the program below says READY once it runs as root: so the password is
said only when it is asked for, once, and the agent's code follows only to the program that waits for it.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List, Optional

from gangline.agent.bounded import stretched
from gangline.agent.prepare.revert_timer import agent_program
from gangline.agent.verbs import VerbFailed

Record = Dict[str, Any]
PROMPT = "gangline-sudo-password:"
READY = b"gangline-root-ready\n"
START_S = 30.0
NEEDS_PASSWORD = "sudo needs a password"  # noqa: S105  (a message)
WRONG_PASSWORD = "sudo refuses the password"  # noqa: S105  (a message)
PROGRAM = (
    "import os,sys;os.write(1,b'gangline-root-ready\\n');"
    "r=lambda n:sys.stdin.buffer.read(n);c=r(int(r(16)));d=os.memfd_create('gangline-agent',0);"
    "f=open(d,'wb',closefd=False);f.write(c);f.flush();sys.path.insert(0,'/proc/self/fd/%d'%d);"
    "from gangline.agent.prepare.__main__ import main;os._exit(main(['answer']))"
)


def ask_as_root(request: Record) -> Iterator[Record]:
    """The answers of the same request as root; raises VerbFailed, with NEEDS_PASSWORD where sudo wants one."""
    password = request.get("password")
    process = _started(has_password=password is not None)
    try:
        _await_root(process, password)
        assert process.stdin is not None
        assert process.stdout is not None
        code = agent_program()
        body = json.dumps({name: value for name, value in request.items() if name != "password"})
        process.stdin.write(b"%016d" % len(code) + code + body.encode())
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        process.wait()
        if process.returncode not in (0, 1):  # 1: its last line is the error
            raise VerbFailed("the agent ended as root", _last_line(process))
    except BrokenPipeError:
        raise VerbFailed("sudo ended", _last_line(process)) from None
    finally:
        _end(process)


def _started(*, has_password: bool) -> subprocess.Popen[bytes]:
    if shutil.which("sudo") is None:
        raise VerbFailed(
            "this change needs root, and there is no sudo",
            "user {} is not root".format(os.getuid()),
            "log in as root for this step, or install sudo",
        )
    how = ["-S", "-p", PROMPT] if has_password else ["-n"]
    return subprocess.Popen(
        ["sudo", *how, "--", sys.executable, "-I", "-S", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd="/",
        env={**os.environ, "LC_ALL": "C"},
    )


def _await_root(process: subprocess.Popen[bytes], password: Optional[str]) -> None:
    """Until the program runs as root; raises VerbFailed where sudo does not let us."""
    assert process.stdin is not None
    said = {"out": b"", "err": b""}
    prompts = 0
    deadline = time.monotonic() + stretched(START_S)
    with selectors.DefaultSelector() as selector:
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, name)
        while READY not in said["out"] and selector.get_map():
            if time.monotonic() > deadline:
                raise VerbFailed("sudo does not answer", _shown(said["err"]), "try there: sudo -v")
            for key, _ in selector.select(0.2):
                piece = os.read(key.fd, 1 << 12) if key.data == "err" else os.read(key.fd, len(READY))
                if not piece:
                    selector.unregister(key.fileobj)
                said[key.data] += piece
            if said["err"].count(PROMPT.encode()) > prompts:
                prompts += 1
                if prompts > 1:
                    raise VerbFailed(WRONG_PASSWORD, "it asks again", "try again; on the host: sudo -v")
                process.stdin.write((password or "").encode() + b"\n")
    if READY not in said["out"]:
        raise _refused(said["err"], has_password=password is not None)


def _refused(said: bytes, *, has_password: bool) -> VerbFailed:
    shown = _shown(said)
    if not has_password and "password" in shown:
        return VerbFailed(NEEDS_PASSWORD, shown)
    if has_password and "incorrect password" in shown:
        return VerbFailed(WRONG_PASSWORD, shown, "try again; on the host: sudo -v")
    return VerbFailed("sudo does not let this user be root", shown, "log in as root for this step")


def _shown(said: bytes) -> str:
    lines: List[str] = said.decode("utf-8", "replace").replace(PROMPT, "").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def _last_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    return _shown(process.stderr.read() or b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It reads its end on stdin; who is root cannot be ended by us in another way."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        try:
            process.send_signal(signal.SIGTERM)  # sudo passes it on
            process.wait(5.0)
        except (PermissionError, subprocess.TimeoutExpired):
            pass
    if process.stderr is not None:
        process.stderr.close()
