"""When each host of a start really came to each stage, seen in /proc: what busy_starts.py compares the board with.

    python busy_truth.py ROOT          # a folder below which RUN/attempts/1 lies; ends when stdin closes

Standard library only, nothing of gangline: it shall not be wrong in the same way. Prints one JSON object:
{"<what> <host or rank>": the time at which it was seen first}.
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from pathlib import Path

LOOK_S = 0.2
LIMIT_S = 900.0
PHASE = struct.Struct("<qqqd")
IMPORTING, JOINING = 0, 1
seen: dict[str, float] = {}


def main(root: Path) -> None:
    """Look until told to end."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for attempt in root.glob("**/attempts/1"):
            look(attempt)
        ready, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if ready:
            break
    print(json.dumps(seen), flush=True)


def look(attempt: Path) -> None:
    """Look once at one host's files of an attempt."""
    for agent in attempt.glob("*/agent.json"):
        pid = read(agent).get("torchrun_pid")
        if pid is None:
            continue
        host = agent.parent.name
        note(f"agent {host}")
        family = below(int(pid))
        if any(b"/libtorch" in data(Path(f"/proc/{each}/maps")) for each in family):
            note(f"launcher {host}")
        port = port_of(int(pid))
        states = {state for inode, state in sockets(port) if inode in inodes(family)}
        if states:
            note(f"port {host}")
    for path in attempt.glob("rank-*.pid"):
        note(f"rank {number(path)}")
    for path in attempt.glob("rank-*.phase"):
        record = data(path)
        phase = PHASE.unpack(record)[1] if len(record) == PHASE.size else IMPORTING
        if phase > IMPORTING:
            note(f"imported {number(path)}")
        if phase > JOINING:
            note(f"joined {number(path)}")


def note(what: str) -> None:
    """It has been seen now, if not before."""
    seen.setdefault(what, time.time())


def number(path: Path) -> str:
    """The rank of a file."""
    return path.name.split("-")[1].split(".")[0]


def port_of(pid: int) -> int:
    """Where a launcher meets the others, as its command line says."""
    words = data(Path(f"/proc/{pid}/cmdline")).split(b"\0")
    return int(words[words.index(b"--master-port") + 1]) if b"--master-port" in words else 0


def below(pid: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and (fields := data(each / "stat").rpartition(b")")[2].split()):
            parents[int(each.name)] = int(fields[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def sockets(port: int) -> list[tuple[str, str]]:
    """Inode and state of the TCP sockets that listen at a port, or are connected to it."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in data(Path("/proc/net", table)).decode().splitlines()]
    wanted = f"{port:04X}"
    return [
        (row[9], row[3])
        for row in rows
        if (row[3] == "0A" and row[1].endswith(f":{wanted}")) or (row[3] == "01" and row[2].endswith(f":{wanted}"))
    ]


def inodes(pids: list[int]) -> set[str]:
    """The sockets that processes have open."""
    found = set()
    for pid in pids:
        try:
            for each in Path(f"/proc/{pid}/fd").iterdir():
                target = str(each.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
        except OSError:
            continue
    return found


def read(path: Path) -> dict[str, object]:
    """A JSON object; {} where there is none."""
    try:
        found = json.loads(data(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def data(path: Path) -> bytes:
    """A file; empty where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
