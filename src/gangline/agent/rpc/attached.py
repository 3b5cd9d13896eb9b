"""`attached`: run a command that must not outlive whoever asked for it.

    gangline-agent attached < {"argv": [...], "seconds": n}      the exit code is the command's

The command has our stdout and stderr; between its lines, {"beat": time} says several times a second that we are here.
Where nobody reads them any more, or after `seconds`, it is ended with everything in its process group.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import List

BEAT_S = 0.3
REQUEST_LIMIT_BYTES = 1 << 20
TOO_LATE = 124
"""The exit code of timeout(1)."""


def attached_main(argv: list[str]) -> int:
    """Entry point."""
    del argv
    request = json.loads(sys.stdin.buffer.read(REQUEST_LIMIT_BYTES))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    deadline = time.monotonic() + float(request["seconds"])
    try:
        child = subprocess.Popen(request["argv"], stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(request["argv"][0] + ": " + str(error.strerror) + "\n")
        return 127
    while time.monotonic() < deadline:
        try:
            code = child.wait(BEAT_S)
        except subprocess.TimeoutExpired:
            _beat()
        else:
            _end_group(child)
            return code if code >= 0 else 128 - code
    sys.stderr.write(request["argv"][0] + " did not end in time\n")
    _end_group(child)
    return TOO_LATE


def _beat() -> None:
    try:
        os.write(1, json.dumps({"beat": time.time()}).encode() + b"\n")
    except OSError:  # nobody reads it: we go, too
        os.killpg(0, signal.SIGKILL)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End what the command left in our process group, but for us."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(2.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# The Python that runs the agent, for a program of its own: `python WORDS...` becomes that Python with those words.


def python_main(argv: List[str]) -> int:
    """Entry point; does not return."""
    # The current folder may be anybody's; Pythons before 3.11 import from it all the same.
    alone = ["-P"] if hasattr(sys.flags, "safe_path") else []
    os.execv(sys.executable, [sys.executable, *alone, *argv])  # noqa: S606  (no shell is wanted)
