"""The state of a run (state.json), the end of an attempt (outcome.json), and the orders of the user (order.json,
leave.json).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there, load_record, write_record

# events.jsonl, with one JSON line per event, and the format of times in all our files.


EventSource = Literal["worker", "supervisor"]


def now_iso() -> str:
    """The time in UTC, with milliseconds: 2026-11-21T06:14:13.042Z."""
    return iso(time.time())


def iso(seconds: float) -> str:
    """A time in seconds after 1970, as `now_iso` writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def append_event(path: Path, event: str, *, source: EventSource, **details: Any) -> None:
    """Add one line to events.jsonl. Several processes may do so: one write() with O_APPEND keeps lines whole."""
    line = json.dumps({"kind": "event", "time": now_iso(), "source": source, "event": event, **details}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


# The identity of a process on this computer.


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
        except OSError:  # it has ended, or is hidden: another user's, where /proc shows own processes only
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
    """The process that /proc/<pid>/stat describes; None for a zombie."""
    # The command name may hold spaces and parentheses; everything after the last ")" is numbers.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in {b"Z", b"X"} else ProcessId(pid=pid, start_ticks=int(fields[19]))


Phase = Literal["queued", "preparing", "running", "stopping", "restarting", "finished", "stopped", "failed"]
"""queued: Slurm has it, and its nodes have not begun.
restarting: an attempt has ended, and the supervisor prepares the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """state.json of the controller. `train` writes it until the supervisor does."""

    name: str
    phase: Phase = "preparing"
    attempt: int = 1
    created: str = field(default_factory=now_iso)
    updated: str = field(default_factory=now_iso)
    supervisor: ProcessId | None = None
    """The supervisor of this attempt; it may be gone."""
    epoch: int = 0
    """Counts the supervisors of the run; of two at the same time, the one with the higher number is in charge."""
    error: dict[str, Any] | None = None
    """`GanglineError.to_json` of what ended the run."""
    quiet_since: str | None = None
    """While it runs: since when no rank has printed anything, if that was reported."""

    def save(self, layout: RunLayout) -> None:
        """Write state.json, with the time of now."""
        write_record(layout.state, dataclasses.asdict(dataclasses.replace(self, updated=now_iso())))

    @staticmethod
    def load(layout: RunLayout) -> RunState:
        """Read state.json; raises FileNotFoundError."""
        return load_record(layout.state, RunState)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutcome:
    """How one host's part of an attempt ended."""

    phase: str
    returncode: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome(Record):
    """outcome.json of one attempt."""

    result: Literal["finished", "stopped", "failed"]
    hosts: dict[str, HostOutcome]
    error: dict[str, Any] | None = None
    """The first cause: `GanglineError.to_json` and, where known, "host", "rank", "log" and "log_tail"."""
    failures: tuple[dict[str, Any], ...] = ()
    """Every rank that ended badly, as the host agents saw it, with its host."""
    left: tuple[str, ...] = ()
    """Leftovers on hosts after the end."""
    unverified: tuple[str, ...] = ()
    """Hosts that did not answer at the end: leftovers there are unknown."""
    ended: str = field(default_factory=now_iso)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Hosts with possible leftovers."""
        return (*self.unverified, *(each.partition(":")[0] for each in self.left))


StopOrder = Literal["stop", "kill"]


def write_order(layout: RunLayout, order: StopOrder, *, attempt: int) -> None:
    """Ask an attempt to end: `stop` saves first, `kill` does not."""
    write_record(layout.order, {"order": order, "attempt": attempt})


def read_order(layout: RunLayout, *, attempt: int) -> StopOrder | None:
    """The order to this attempt, if there is one."""
    said = load_if_there(layout.order, dict)
    order = said.get("order") if said and said.get("attempt") == attempt else None
    return order if order in {"stop", "kill"} else None


def write_leave(layout: RunLayout, hosts: Iterable[str], *, attempt: int) -> None:
    """Order some hosts of this attempt to leave, in addition to those with that order before."""
    asked = dict.fromkeys((*read_leave(layout, attempt=attempt), *hosts))
    write_record(layout.leave, {"hosts": list(asked), "attempt": attempt})


def read_leave(layout: RunLayout, *, attempt: int) -> tuple[str, ...]:
    """Hosts of this attempt that the user wants to leave."""
    said = load_if_there(layout.leave, dict)
    hosts = said.get("hosts") if said and said.get("attempt") == attempt else None
    return tuple(map(str, hosts)) if isinstance(hosts, list) else ()
