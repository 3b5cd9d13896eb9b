"""Processes as /proc shows them: who descends from whom, who carries a tag, and how to end them all.

A process is named by (pid, start_ticks), never by its command line: a pid alone may have been given away again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One process."""

    pid: int
    start_ticks: int
    """Start time in clock ticks after boot."""
    parent: int
    state: str
    """One letter, as in proc(5); Z: ended, but not yet waited for."""
    session: int = 0


def find(pid: int) -> Optional[Process]:
    """The process with this pid, or None."""
    try:
        # The command name may hold spaces and parentheses; everything after the last ")" is numbers.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it is gone; or another user's, where /proc shows everybody only his own
        return None
    return Process(pid, int(fields[19]), int(fields[1]), fields[0].decode(), int(fields[3]))


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether that very process still runs."""
    process = find(pid)
    return process is not None and process.start_ticks == start_ticks and process.state not in "ZX"


def every_process() -> List[Process]:
    """All processes of this host that we may see."""
    found = (find(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [process for process in found if process is not None]


def descendants(root: int) -> List[Process]:
    """Children, grandchildren and so on of `root` that still run.

    For a child subreaper this is everything it ever started: orphans come back to it, whatever session they made.
    """
    children: Dict[int, List[Process]] = {}
    for process in every_process():
        children.setdefault(process.parent, []).append(process)
    found: List[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return [process for process in found if process.state not in "ZX"]


def tagged(tag: str) -> List[Process]:
    """Processes other than this one that were started with `tag` ("NAME=value") in their environment."""
    wanted = os.fsencode(tag)
    found = []
    for process in every_process():
        if process.pid == os.getpid() or process.state in "ZX":
            continue
        try:
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue  # another user's, or gone
    return found


def become_subreaper() -> None:
    """Make orphaned descendants children of this process; raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def send(process: Process, number: int) -> None:
    """Send a signal, unless the process is gone."""
    if is_alive(process.pid, process.start_ticks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def reap() -> Dict[int, int]:
    """Take the exit codes of ended children: pid -> code, negative for a signal."""
    ended: Dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def end_all(found: Callable[[], List[Process]], *, timeout_s: float = 10.0) -> int:
    """SIGKILL what `found` finds until it finds nothing; returns how many are left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = found()
        if not left:
            return 0
        if time.monotonic() > deadline:
            return len(left)
        for process in left:
            send(process, signal.SIGKILL)
        reap()
        time.sleep(0.02)
