"""Bounds on a host's memory and CPU time, by control groups of version 1 or 2."""

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tests.lab.namespaces import LabFailed

BASE = Path("/sys/fs/cgroup")


@functools.cache
def version() -> int | None:
    """1 or 2: the control groups that can bound memory and CPU here; None: nothing can."""
    if not os.access(BASE, os.W_OK) or os.getuid() != 0:
        return None
    controllers = BASE / "cgroup.controllers"
    if controllers.exists():
        return 2 if {"cpu", "memory"} <= set(controllers.read_text().split()) else None
    return 1 if all((BASE / name / "cgroup.procs").exists() for name in ("cpu", "memory")) else None


def processes_of(pid: int) -> list[int]:
    """All processes in the pid namespace of process `pid`."""
    wanted = Path(f"/proc/{pid}/ns/pid").stat().st_ino
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns" / "pid").stat().st_ino == wanted:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def shown() -> tuple[Path, ...]:
    """Folders for a host's `binds`, so that its programs see the limit of their memory and whom the kernel killed."""
    return (BASE,) if version() == 2 else (BASE, BASE / "memory")


class ControlGroup:
    """One host's bounds. The switch removes the group when the lab has ended."""

    def __init__(self, name: str) -> None:
        if version() is None:
            raise LabFailed("no control groups for memory and cpu that we may write")
        if version() == 2:
            (BASE / "cgroup.subtree_control").write_text("+cpu +memory")
            self.folders = {"cpu": BASE / name, "memory": BASE / name}
        else:
            self.folders = {"cpu": BASE / "cpu" / name, "memory": BASE / "memory" / name}
        for folder in self.folders.values():
            folder.mkdir(exist_ok=True)

    @property
    def _lists(self) -> list[Path]:
        return list(dict.fromkeys(folder / "cgroup.procs" for folder in self.folders.values()))

    def add(self, pids: Iterable[int]) -> None:
        """Put these processes in; their children follow."""
        for pid in pids:
            for path in self._lists:
                try:
                    path.write_text(str(pid))
                except ProcessLookupError:
                    continue

    def joined(self, argv: list[str]) -> list[str]:
        """The command that joins the group and becomes `argv`."""
        script = 'for list in $0; do echo $$ > "$list"; done; exec "$@"'
        return ["sh", "-c", script, " ".join(map(str, self._lists)), *argv]

    def limit(self, *, memory_mb: int | None, cpus: float | None) -> None:
        """Set the bounds that are given."""
        if memory_mb is not None:
            name = "memory.max" if version() == 2 else "memory.limit_in_bytes"
            (self.folders["memory"] / name).write_text(str(memory_mb * 2**20))
        if cpus is not None and version() == 2:
            (self.folders["cpu"] / "cpu.max").write_text(f"{round(cpus * 100000)} 100000")
        elif cpus is not None:
            (self.folders["cpu"] / "cpu.cfs_period_us").write_text("100000")
            (self.folders["cpu"] / "cpu.cfs_quota_us").write_text(str(round(cpus * 100000)))

    def remove(self) -> None:
        """Once nothing runs in it."""
        for folder in set(self.folders.values()):
            folder.rmdir()

    def num_killed(self) -> int:
        """How many of its processes the kernel killed for want of memory."""
        name = "memory.events" if version() == 2 else "memory.oom_control"
        found = re.search(r"^oom_kill (\d+)", (self.folders["memory"] / name).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def held_mb(self) -> int:
        """MiB that its processes hold, without pages of files, which the kernel takes back where memory is short."""
        used, files = ("memory.current", "file") if version() == 2 else ("memory.usage_in_bytes", "total_cache")
        shared = "shmem" if version() == 2 else "total_shmem"
        rows = [line.split() for line in (self.folders["memory"] / "memory.stat").read_text().splitlines()]
        found = {name: int(size) for name, size in rows}
        held = int((self.folders["memory"] / used).read_text()) - found[files] + found[shared]
        return held >> 20
