"""A command and everything it started: descendants, and its whole session. Who detached himself is not of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

END_S = 5.0
"""How long processes may take to go after SIGKILL; one that hangs in the kernel is left to it."""


def end_family(process: subprocess.Popen[bytes]) -> None:
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
    while any(_start_ticks(pid) == ticks for pid, ticks in family.items()) and time.monotonic() < deadline:
        time.sleep(0.005)


def members(root: int) -> dict[int, int]:
    """Pid -> start in clock ticks after boot, of `root`, its descendants and every process of its session."""
    seen: dict[int, tuple[int, int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            seen[int(name)] = fields
    found = {root} | {pid for pid, (_, session, _) in seen.items() if session == root}
    grown = True
    while grown:
        below = {pid for pid, (parent, _, _) in seen.items() if parent in found}
        grown = not below <= found
        found |= below
    return {pid: seen[pid][2] for pid in found if pid in seen}


def _stat(pid: int) -> tuple[int, int, int] | None:
    """Parent, session and start of a process that runs; None for one that does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The command name may hold spaces and parentheses; everything after the last ")" is numbers.
            fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else (int(fields[1]), int(fields[3]), int(fields[19]))


def _start_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else fields[2]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
