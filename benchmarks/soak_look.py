"""What runs on a lab host, and what it holds: processes, file handles, memory, by kind. Runs there, as root (soak.py).

    python3 - RUNS HOST < soak_look.py    -> {"<kind>": {"processes": n, "handles": n, "rss_mib": x, "oldest": ...}}

RUNS: the folder of runs there. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
MARKS = (("gangline.supervise", "supervisor"), ("torch.distributed.run", "torchrun"), ("gangline.worker", "prefork"))


def stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat behind the name: state, parent, ... (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def host_agents(runs: Path, host: str) -> set[tuple[int, int]]:
    """Process and start of every host agent of this host that has ever stood."""
    found = set()
    for path in runs.glob(f"*/attempts/*/{host}/agent.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(path.read_text())
            found.add((int(record["pid"]), int(record["start_ticks"])))
    return found


def words(pid: int) -> str:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def is_prefork(line: str) -> bool:
    """Whether a command line is that of a process that stands by: torchrun's has the same words, and more."""
    return "gangline.worker" in line and "torch.distributed.run" not in line


def kind(pid: int, fields: list[str], standing: set[tuple[int, int]]) -> str:
    """What it is there for."""
    if fields[0] == "Z":
        return "zombie"
    if (pid, int(fields[19])) in standing:
        return "host-agent"
    line = words(pid)
    name = Path(line.split(" ")[0].rstrip(":")).name
    for mark, found in MARKS:
        if mark in line:
            return "rank" if found == "prefork" and is_prefork(words(int(fields[1]))) else found
    if name in {"ssh", "sshd"} or name.startswith("sshd"):
        return "ssh" if name == "ssh" else "sshd"
    return "other python" if name.startswith("python") else "other"


def main() -> None:
    """Look, and print."""
    standing = host_agents(Path(sys.argv[1]), sys.argv[2])
    found: dict[str, dict[str, Any]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if pid == os.getpid():
            continue
        try:
            fields = stat(pid)
            handles = 0 if fields[0] == "Z" else len(list(Path(f"/proc/{pid}/fd").iterdir()))
            rss_mib = int(fields[21]) * PAGE_MIB
            row = found.setdefault(kind(pid, fields, standing), {"processes": 0, "handles": 0, "rss_mib": 0.0})
        except (OSError, IndexError):  # it has just ended
            continue
        row["processes"] += 1
        row["handles"] += handles
        row["rss_mib"] = round(row["rss_mib"] + rss_mib, 2)
        since = int(fields[19])
        if since < row.get("since", since + 1):
            row.update(since=since, oldest=[pid, since, round(rss_mib, 2), handles])
    for row in found.values():
        row.pop("since", None)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
