"""`send`: a folder of this host brought to another host by rsync over ssh, with this user's own keys. JSON on stdin.

Request:  {"folder": PATH, "names": [FILE, ...], "target": PATH, "timeout_s": N,
           "peer": {"name", "user", "address", "port", "host_key"}}
Lines:    {"kind": "progress", "done_bytes"}, and last
          {"kind": "result", "sent": true} or {"kind": "result", "sent": false, "why": TEXT}

names: what is sent of the folder; links are followed. target: a folder that is there already. The peer is taken for
itself only by `host_key`; nothing is asked, and what it has of an earlier try is gone on with.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Dict, List, Tuple

from gangline.agent.bounded import run
from gangline.agent.verbs import write_line

CONNECT_S = 6
TAIL_LINES = 5
_ECHOES = ("rsync: connection unexpectedly closed", "rsync error: ")
"""What rsync says after ssh has said why."""
_PROGRESS = re.compile(r"\s*([0-9][0-9,.']*)\s+[0-9]+%")


def send(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    missing = [name for name in ("rsync", "ssh") if shutil.which(name) is None]
    if missing:
        return {"kind": "result", "sent": False, "why": "it has no {}".format(" and no ".join(missing))}
    base = tempfile.gettempdir()
    plain = re.match(r"/[A-Za-z0-9_/.+-]*$", base)
    folder = Path(tempfile.mkdtemp(prefix="gangline-send-", dir=base if plain else "/tmp"))  # noqa: S108  (0700)
    try:
        return {"kind": "result", **_run(request, folder)}
    except OSError as error:
        return {"kind": "result", "sent": False, "why": "{}: {}".format(error.filename, error.strerror)}
    finally:
        shutil.rmtree(str(folder), ignore_errors=True)


def rsync_argv(request: Dict[str, Any], folder: Path) -> List[str]:
    """The command. `folder`: where known_hosts and the list of files lie, a path without spaces."""
    peer = request["peer"]
    address = "[{}]".format(peer["address"]) if ":" in peer["address"] else peer["address"]
    return [
        "rsync", "--times", "--copy-links", "--partial", "--chmod=F600,D700", "--protect-args", "--info=progress2",
        "--from0", "--files-from={}".format(folder / "names"), "--timeout=60",
        "--rsh={}".format(" ".join(_ssh_words(peer, folder))),
        "--", str(request["folder"]) + "/", "{}@{}:{}/".format(peer["user"], address, request["target"]),
    ]  # fmt: skip


def _ssh_words(peer: Dict[str, Any], folder: Path) -> List[str]:
    """No word has a space: rsync cuts its --rsh at spaces. The options are those of
    gangline/transport/ssh_options.py.
    """
    known = folder / "known_hosts"
    kind = peer["host_key"].split()[0]
    options = [
        "BatchMode=yes", "StrictHostKeyChecking=yes", "UpdateHostKeys=no", "VerifyHostKeyDNS=no", "CheckHostIP=no",
        "NoHostAuthenticationForLocalhost=no", "ForwardAgent=no", "ForwardX11=no", "PermitLocalCommand=no",
        "ControlMaster=no", "ControlPath=none", "ServerAliveInterval=5", "ServerAliveCountMax=3", "LogLevel=ERROR",
        "RemoteCommand=none", "ClearAllForwardings=yes",
        "HostKeyAlgorithms={}".format("rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind),
        *(["KnownHostsCommand=none"] if _ssh_version() >= (8, 5) else []),
        "ConnectTimeout={}".format(CONNECT_S), "UserKnownHostsFile={}".format(known),
        "GlobalKnownHostsFile={}".format(known), "HostKeyAlias={}".format(peer["name"]),
    ]  # fmt: skip
    return ["ssh", *(word for option in options for word in ("-o", option)), "-p", str(int(peer["port"]))]


def _ssh_version() -> Tuple[int, int]:
    """Of the ssh here: an older one refuses options that it does not know."""
    found = re.search(r"OpenSSH\D*(\d+)\.(\d+)", run(["ssh", "-V"]).stderr)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def _run(request: Dict[str, Any], folder: Path) -> Dict[str, Any]:
    peer = request["peer"]
    (folder / "known_hosts").write_text("{} {}\n".format(peer["name"], peer["host_key"]), encoding="ascii")
    names = b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in request["names"])
    (folder / "names").write_bytes(names)
    process = subprocess.Popen(
        rsync_argv(request, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    words: List[str] = []
    reader = threading.Thread(target=_read_errors, args=(process.stderr, words))
    reader.start()
    clock = threading.Timer(float(request["timeout_s"]), _end, (process.pid,))
    clock.start()
    try:
        _tell_progress(process.stdout)
        code = process.wait()
    finally:
        clock.cancel()
        _end(process.pid)
        reader.join()
        process.stdout.close()
        process.stderr.close()
    if code == 0:
        return {"sent": True}
    own = [word for word in words if not word.startswith(_ECHOES)]
    return {"sent": False, "why": "; ".join(own or words) or "rsync ended with exit code {}".format(code)}


def _end(group: int) -> None:
    """End rsync with its ssh."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _tell_progress(stream: IO[bytes]) -> None:
    """One line, which rsync writes over and over."""
    rest, said = b"", -1
    while True:
        piece = stream.read1(4096)  # type: ignore[attr-defined]
        if not piece:
            return
        pieces = (rest + piece).replace(b"\n", b"\r").split(b"\r")
        rest = pieces.pop()[-200:]
        found = [match for text in pieces for match in [_PROGRESS.match(text.decode("ascii", "replace"))] if match]
        done = int(re.sub(r"\D", "", found[-1].group(1))) if found else said
        if done > said:
            said = done
            write_line({"kind": "progress", "done_bytes": done})


def _read_errors(stream: IO[bytes], words: List[str]) -> None:
    """The last lines of it."""
    for line in stream:
        words.append(line.decode("utf-8", "replace").strip()[:300])
        del words[:-TAIL_LINES]
