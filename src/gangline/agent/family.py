"""A command and everything it started: descendants, and its whole session. Who detached himself is not of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from gangline.agent import processes

if TYPE_CHECKING:
    from gangline.agent.forked import Forked

END_S = 5.0
"""How long processes may take to go after SIGKILL; one that hangs in the kernel is left to it."""


def end_family(process: subprocess.Popen[bytes] | Forked) -> None:
    """SIGKILL a command that leads a session, with its family, and wait until they are gone."""
    # Stopped first, so that nothing forks between the look and the kill.
    for pid in members(process.pid):
        _send(pid, signal.SIGSTOP)
    family = members(process.pid)
    for pid in family:
        _send(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    deadline = time.monotonic() + END_S
    while any(processes.is_alive(pid, ticks) for pid, ticks in family.items()) and time.monotonic() < deadline:
        time.sleep(0.005)


def members(root: int) -> dict[int, int]:
    """Pid -> start in clock ticks after boot, of `root`, its descendants and every process of its session."""
    seen = {process.pid: process for process in processes.every_process() if process.state not in "ZX"}
    found = {root} | {pid for pid, process in seen.items() if process.session == root}
    grown = True
    while grown:
        below = {pid for pid, process in seen.items() if process.parent in found}
        grown = not below <= found
        found |= below
    return {pid: seen[pid].start_ticks for pid in found if pid in seen}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
