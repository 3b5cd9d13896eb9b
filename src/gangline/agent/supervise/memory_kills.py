"""Which of our ranks the kernel has killed because memory ran out.

Two witnesses. The kernel's log names the process that it killed; its numbers are those of the first pid namespace, so
it is asked only there, and where it may be read. Our control group counts how many of its processes were killed, and
names none: where the log does not say who they were, it was those of our ranks that ended by SIGKILL first.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from gangline.agent.host_facts.system import meminfo, memory_groups, own_groups
from gangline.agent.host_files import read_text

KILLED = re.compile(r"\bKilled process (\d+)\b")
"""What the kernel writes of a process that it killed for memory, and of no other."""
COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
FIRST_NAMESPACE = 4026531836
"""Of /proc/self/ns/pid where nobody made another one (PROC_PID_INIT_INO in the kernel)."""
RECORD_BYTES = 8192
"""No record of the kernel's log is longer."""
MOST_RECORDS = 20000
"""At one look; more are left for the next."""
LINE_LETTERS = 400


class MemoryKills:
    """What memory has cost since this was made, or since `begin` was called.

    log, root, own: where the kernel's log, control groups and our own place in them are read.
    """

    def __init__(self, *, log: str = "/dev/kmsg", root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> None:
        self._log = _open_at_end(log)
        self._group = _group(Path(root), Path(own))
        self._lines: Dict[int, str] = {}
        """What the log has said, by pid."""
        self._before = 0
        self.begin()

    def begin(self) -> None:
        """Forget what was: a new attempt begins."""
        self._read_log()
        self._lines = {}
        self._before = self._count()

    def note(self, failures: List[Dict[str, Any]]) -> None:
        """Add "oom" to the failures of ranks that were killed for memory; see `Ranks.failures`.

        {"line": what the kernel's log says or None, "cgroup": the control group that counted it or None, "limit_bytes":
        the least that control groups allow or None, "memory_bytes": what the machine has or None}.
        """
        killed = self._killed(failures)
        if not killed:
            return
        limit = min((limit for limit, _ in memory_groups()), default=None)
        for failure in killed:
            line = self._lines.get(failure["pid"])
            failure["oom"] = {
                "line": line,
                "cgroup": self._group[0] if self._group is not None and self._count() > self._before else None,
                "limit_bytes": limit,
                "memory_bytes": meminfo().get("MemTotal"),
            }

    def _killed(self, failures: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
        self._read_log()
        named = [each for each in failures if each["pid"] in self._lines and each["exit"] in (None, -signal.SIGKILL)]
        others = [
            each
            for each in failures
            if each["exit"] == -signal.SIGKILL and not each["ordered"] and each["pid"] not in self._lines
        ]
        # who is tidied up afterwards, by SIGKILL as well, comes later
        others.sort(key=lambda each: float(each["time"]))
        # of whom the log tells, ours or not, the count tells nothing new
        unnamed = self._count() - self._before - len(self._lines)
        return named + others[: max(0, unnamed)]

    def _read_log(self) -> None:
        if self._log is None:
            return
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(self._log, RECORD_BYTES)
            except BrokenPipeError:  # what we had not read was overwritten; the next one is there
                continue
            except OSError:  # nothing more
                return
            if not record:
                return
            for line in record.decode("utf-8", "replace").splitlines():
                match = KILLED.search(line)
                if match is not None:
                    self._lines[int(match.group(1))] = line.partition(";")[2][:LINE_LETTERS] or line[:LINE_LETTERS]

    def _count(self) -> int:
        return 0 if self._group is None else _killed_in(self._group[1]) or 0


def _open_at_end(path: str) -> Optional[int]:
    """The kernel's log from here on; None where it may not be read, or numbers processes otherwise than we do."""
    try:
        if Path("/proc/self/ns/pid").stat().st_ino != FIRST_NAMESPACE:
            return None
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None
    return log


def _group(root: Path, own: Path) -> Optional[Tuple[str, Path]]:
    """Our control group: its name, and the file that counts; of version 2, else 1."""
    for name, place, is_old in own_groups(root, own):
        file = "memory.oom_control" if is_old else "memory.events"
        # in a container the group is often named from outside and not there: then the top is our own
        for folder in (place / name.strip("/"), place):
            if _killed_in(folder / file) is not None:
                return name, folder / file
    return None


def _killed_in(file: Path) -> Optional[int]:
    """How many processes of a control group were killed for memory, ever; None where it does not say."""
    match = COUNT.search(read_text(file) or "")
    return int(match.group(1)) if match is not None else None
