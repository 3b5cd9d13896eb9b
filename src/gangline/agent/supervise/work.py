"""Whether processes work: processor time, waits for a processor, page faults and bytes read, as /proc counts them.

A start is silent for as long as its imports take, minutes from a cold disk or on a busy computer. A process that works
meanwhile is slow, also one that is ready to and does not get a processor; one that sleeps is stuck.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Tuple

from gangline.agent.host_files import read_bytes

APART_S = 5.0
"""Looks that are further apart say nothing of the time between them."""
WINDOW_S = 10.0
"""Work counts together for so long: a process that only looks now and then stays below `ENOUGH`."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Amount(NamedTuple):
    """Work of processes since their start."""

    cpu_s: float = 0.0
    minor_faults: float = 0.0
    """Pages that were mapped without a read."""
    major_faults: float = 0.0
    """Pages that were read from a disk or a file server."""
    read_bytes: float = 0.0
    """Bytes that system calls have read, also from the cache."""
    stored_bytes: float = 0.0
    """Bytes that came from a disk or a file server."""
    wanted_s: float = 0.0
    """Time on a processor, or ready and without one; of the main thread alone."""

    def plus(self, other: "Amount") -> "Amount":
        """The sum."""
        return Amount(*(mine + its for mine, its in zip(self, other)))

    def since(self, before: "Amount") -> "Amount":
        """The difference; never below zero."""
        return Amount(*(max(0.0, now - then) for now, then in zip(self, before)))


ENOUGH = Amount(
    cpu_s=0.2, minor_faults=500, major_faults=20, read_bytes=1 << 20, stored_bytes=1 << 18, wanted_s=WINDOW_S / 2
)
"""Any of these within a window is work. With 40 processes on two cores an import was ready all the time and got 0.03 s
in 10 s; a process that looks ten times a second whether it can go on is ready for a third of the time then.
"""


class WorkWatch:
    """The work of a group of processes, looked at about once a second; members come and go."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: Dict[int, Amount] = {}
        self._window: Tuple[float, Amount] = (clock(), Amount())
        """When it began, and what was done in it."""
        self._worked_at = clock()
        self.total = Amount()
        """Since the first look."""

    def look(self, pids: Iterable[int]) -> None:
        """Look once at the processes of the group."""
        now = self._clock()
        amounts = {pid: amount for pid, amount in ((pid, amount_of(pid)) for pid in pids) if amount is not None}
        fresh = Amount()
        for pid, amount in amounts.items():
            fresh = fresh.plus(amount.since(self._last.get(pid, Amount())))
        self._last = amounts
        self.total = self.total.plus(fresh)
        begun, done = self._window
        done = done.plus(fresh)
        if any(mine >= enough for mine, enough in zip(done, ENOUGH)):
            self._worked_at, self._window = now, (now, Amount())
        elif now - begun >= WINDOW_S:
            self._window = (now, Amount())
        else:
            self._window = (begun, done)

    @property
    def idle_s(self) -> float:
        """For how long it has done nothing that counts."""
        return max(0.0, self._clock() - self._worked_at)

    def row(self) -> Dict[str, Any]:
        """What the status says of it."""
        return {
            "idle_s": round(self.idle_s, 1),
            "cpu_s": round(self.total.cpu_s, 1),
            "read_bytes": int(self.total.read_bytes),
        }


class StarvedTime:
    """For how long a process could not go on, though it wanted to: it was ready and had no processor, also where its
    control group had used up its quota, or waited for pages from a disk, as of a computer that swaps.

    Of several threads the one that waited longest counts, for the others of a computation wait for it. A process that
    sleeps, or was stopped, waits for neither.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pid = 0
        self._looked_at = float("-inf")
        self._delays: Dict[str, Tuple[int, int]] = {}
        self._faults = 0
        self.seconds = 0.0
        """In all; only of the time between two looks that were not further apart than `APART_S`."""

    def look(self, pid: int) -> None:
        """Look once; reads one small file per thread."""
        now = self._clock()
        delays, faults = _run_delays(pid), _major_faults(pid)
        passed_s = now - self._looked_at
        if pid == self._pid and passed_s <= APART_S:
            known = delays.keys() & self._delays.keys()
            starved_s = max((delays[name][1] - self._delays[name][1] for name in known), default=0) / 1e9
            # the kernel adds to the delay only when the thread gets a processor
            if any(delays[name] == self._delays[name] and _is_ready(pid, name) for name in known):
                starved_s = passed_s
            if faults - self._faults >= passed_s * ENOUGH.major_faults / WINDOW_S:
                starved_s = passed_s
            self.seconds += min(max(0.0, starved_s), passed_s)
        self._pid, self._looked_at, self._delays, self._faults = pid, now, delays, faults


def _is_ready(pid: int, thread: str) -> bool:
    stat = read_bytes(Path(f"/proc/{pid}/task/{thread}/stat"))
    return stat.rpartition(b")")[2].split()[:1] == [b"R"]


def _run_delays(pid: int) -> Dict[str, Tuple[int, int]]:
    """Thread -> for how many nanoseconds it ran, and was ready and had no processor, since its start."""
    found: Dict[str, Tuple[int, int]] = {}
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for thread in threads:
        words = read_bytes(thread / "schedstat").split()
        if len(words) == 3:
            found[thread.name] = (int(words[0]), int(words[1]))
    return found


def _major_faults(pid: int) -> int:
    fields = read_bytes(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return int(fields[9]) if len(fields) > 9 else 0


def amount_of(pid: int) -> Optional[Amount]:
    """What a process has done since its start; None: it is gone. Bytes are 0 where we may not see them."""
    fields = read_bytes(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    if len(fields) < 13:
        return None
    counts = dict(line.split(b": ") for line in read_bytes(Path(f"/proc/{pid}/io")).splitlines() if b": " in line)
    return Amount(
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        minor_faults=float(fields[7]),
        major_faults=float(fields[9]),
        read_bytes=float(counts.get(b"rchar", 0)),
        stored_bytes=float(counts.get(b"read_bytes", 0)),
        wanted_s=sum(map(int, read_bytes(Path(f"/proc/{pid}/schedstat")).split()[:2])) / 1e9,
    )


def load_per_core() -> Optional[float]:
    """Processes that want a core or wait for a disk, per core of this computer, over the last minute; None: unknown."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except OSError:
        return None
