"""Processes as /proc shows them: who descends from whom, who carries a tag, and how to end them all.

A process is named by (pid, start_ticks), never by its command line: a pid alone may have been given away again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Protocol, Set, Tuple

from gangline.agent.host_files import read_bytes

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


def this_process() -> Process:
    """The process that asks."""
    process = find(os.getpid())
    assert process is not None
    return process


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
        if wanted in environment(process.pid):
            found.append(process)
    return found


def environment(pid: int) -> List[bytes]:
    """The variables, as NAME=value, with which a process was started; [] if it is gone, or another user's."""
    return read_bytes(Path(f"/proc/{pid}/environ")).split(b"\0")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process; raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def send(process: Process, number: int) -> None:
    """Send a signal, unless the process is gone, or another user's: the kernel refuses that."""
    if is_alive(process.pid, process.start_ticks):
        with contextlib.suppress(ProcessLookupError, PermissionError):
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


END_S = 5.0
"""How long processes may take to go after SIGKILL; one that hangs in the kernel is left to it."""


class Waitable(Protocol):
    """A child of this process, such as a `subprocess.Popen`."""

    pid: int

    def wait(self, timeout: float) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""


def end_family(process: Waitable) -> None:
    """SIGKILL a command that leads a session, with its family, and wait until they are gone. A process that has made a
    session of its own, and has no living parent in the family, is not of it.
    """
    # Stopped first, so that nothing forks between the look and the kill.
    for pid in members(process.pid):
        _send(pid, signal.SIGSTOP)
    family = members(process.pid)
    for pid in family:
        _send(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    deadline = time.monotonic() + END_S
    while any(is_alive(pid, ticks) for pid, ticks in family.items()) and time.monotonic() < deadline:
        time.sleep(0.005)


def members(root: int) -> Dict[int, int]:
    """Pid -> start in clock ticks after boot, of `root`, its descendants and every process of its session."""
    seen = {process.pid: process for process in every_process() if process.state not in "ZX"}
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


# TCP sockets as /proc shows them: who listens, who is connected, who gets no answer.


ESTABLISHED, SYN_SENT, LISTEN = "01", "02", "0A"
RESENDING = "01:"
"""The timer that runs in a socket which waits for an acknowledgement."""
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
INODE = re.compile(r"socket:\[(\d+)\]")
MAPPED = b"\0" * 10 + b"\xff\xff"
"""How an IPv6 socket writes an IPv4 address."""

Endpoint = Tuple[str, int]


class Socket(NamedTuple):
    """One TCP socket of this host."""

    local: Endpoint
    remote: Endpoint
    state: str
    inode: int


def sockets(*states: str) -> List[Socket]:
    """All TCP sockets that are in one of the states."""
    return _sockets(lambda row: row[3] in states)


def unacknowledged() -> List[Socket]:
    """TCP sockets that have sent the same again and again, and get no acknowledgement."""
    return _sockets(lambda row: row[5].startswith(RESENDING) and int(row[6], 16) > 0)


def _sockets(is_wanted: Callable[[List[str]], bool]) -> List[Socket]:
    found: List[Socket] = []
    for table in TABLES:
        with contextlib.suppress(OSError), Path(table).open(encoding="ascii") as stream:
            next(stream, "")
            rows = (line.split() for line in stream)
            found += [
                Socket(_endpoint(row[1]), _endpoint(row[2]), row[3], int(row[9])) for row in rows if is_wanted(row)
            ]
    return found


def of_processes(pids: Iterable[int], among: Iterable[Socket]) -> List[Socket]:
    """Those of the sockets that one of the processes has open."""
    owned: Set[int] = set()
    for pid in pids:
        owned |= inodes(pid)
    return [each for each in among if each.inode in owned]


def inodes(pid: int) -> Set[int]:
    """The sockets that a process has open; none where we may not look."""
    found = set()
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                match = INODE.fullmatch(os.readlink(path))  # noqa: PTH115  (Path.readlink is of Python 3.9)
                if match:
                    found.add(int(match.group(1)))
    return found


def _endpoint(text: str) -> Endpoint:
    address, _, port = text.partition(":")
    # The kernel prints 32-bit words as numbers, in the byte order of the machine.
    raw = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
    raw = raw[len(MAPPED) :] if raw.startswith(MAPPED) else raw  # noqa: FURB188  (of Python 3.9)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)
