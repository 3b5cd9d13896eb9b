"""TCP sockets as /proc shows them: who listens, who is connected, who gets no answer."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from pathlib import Path
from typing import Iterable, List, NamedTuple, Set, Tuple

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
    found: List[Socket] = []
    for table in TABLES:
        with contextlib.suppress(OSError), Path(table).open(encoding="ascii") as stream:
            next(stream, "")
            rows = (line.split() for line in stream)
            found += [_parsed(row) for row in rows if row[3] in states]
    return found


def unacknowledged() -> List[Socket]:
    """TCP sockets that have sent the same again and again, and get no acknowledgement."""
    found: List[Socket] = []
    for table in TABLES:
        with contextlib.suppress(OSError), Path(table).open(encoding="ascii") as stream:
            next(stream, "")
            rows = (line.split() for line in stream)
            found += [_parsed(row) for row in rows if row[5].startswith(RESENDING) and int(row[6], 16) > 0]
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


def _parsed(row: List[str]) -> Socket:
    return Socket(_endpoint(row[1]), _endpoint(row[2]), row[3], int(row[9]))


def _endpoint(text: str) -> Endpoint:
    address, _, port = text.partition(":")
    # The kernel prints 32-bit words as numbers, in the byte order of the machine.
    raw = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
    raw = raw[len(MAPPED) :] if raw.startswith(MAPPED) else raw  # noqa: FURB188  (of Python 3.9)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)
