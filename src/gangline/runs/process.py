"""A process of this computer, named so that no other can be taken for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A pid with the time at which it started; the pid alone may be given to another process later."""

    pid: int
    start_ticks: int
    """Clock ticks after boot."""

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """The process that has this pid now."""
        try:
            return parse_stat(pid, Path(f"/proc/{pid}/stat").read_bytes())
        except OSError:  # it is gone; or another user's, where /proc shows everybody only his own
            return None

    @staticmethod
    def current() -> ProcessId:
        """This process."""
        me = ProcessId.of(os.getpid())
        assert me is not None
        return me

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs here."""
        return ProcessId.of(self.pid) == self

    def to_json(self) -> dict[str, Any]:
        """Plain data, as in rank-<r>.pid."""
        return {"pid": self.pid, "start_ticks": self.start_ticks}


def parse_stat(pid: int, stat: bytes) -> ProcessId | None:
    """The process that /proc/<pid>/stat describes; None if it has ended and is only waited for."""
    # The command name may hold spaces and parentheses; everything after the last ")" is numbers.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in {b"Z", b"X"} else ProcessId(pid=pid, start_ticks=int(fields[19]))
