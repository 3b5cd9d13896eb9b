"""Where a run stands (state.json), how an attempt ended (outcome.json), and what the user ordered (order.json) or asked
of it (leave.json).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gangline.runs.decode import build
from gangline.runs.events import now_iso
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.runs.versions import load_if_there, load_record, write_record

Phase = Literal["preparing", "running", "stopping", "restarting", "finished", "stopped", "failed"]
"""restarting: an attempt has ended, and the supervisor prepares the next one."""


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
    """Counts the supervisors of the run; of two that look after it, the one with the higher number is in charge."""
    error: dict[str, Any] | None = None
    """`GanglineError.to_json` of what ended the run."""
    quiet_since: str | None = None
    """While it runs: since when no rank has printed anything, if that was told."""

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
class Outcome:
    """outcome.json of one attempt."""

    result: Literal["finished", "stopped", "failed"]
    hosts: dict[str, HostOutcome]
    error: dict[str, Any] | None = None
    """The first cause: `GanglineError.to_json` and, where known, "host", "rank", "log" and "log_tail"."""
    failures: tuple[dict[str, Any], ...] = ()
    """Every rank that ended badly, as the guards saw it, with its host."""
    left: tuple[str, ...] = ()
    """What was still there after the end, as seen on the hosts."""
    unverified: tuple[str, ...] = ()
    """Hosts that did not answer at the end: nobody has seen whether something is left there."""
    ended: str = field(default_factory=now_iso)

    def save(self, path: Path) -> None:
        """Write outcome.json."""
        write_record(path, dataclasses.asdict(self))

    @staticmethod
    def load(path: Path) -> Outcome:
        """Read outcome.json; raises FileNotFoundError and RecordError."""
        return load_record(path, Outcome)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Outcome:
        """The outcome that `save` wrote; raises DecodeError for anything else."""
        return build(Outcome, data)


Order = Literal["stop", "kill"]


def write_order(layout: RunLayout, order: Order, *, attempt: int) -> None:
    """Ask an attempt to end: `stop` saves first, `kill` does not."""
    write_record(layout.order, {"order": order, "attempt": attempt})


def read_order(layout: RunLayout, *, attempt: int) -> Order | None:
    """What was ordered of this attempt, if anything."""
    said = load_if_there(layout.order, dict)
    order = said.get("order") if said and said.get("attempt") == attempt else None
    return order if order in {"stop", "kill"} else None


def write_leave(layout: RunLayout, hosts: Iterable[str], *, attempt: int) -> None:
    """Ask a run to go on without some hosts of this attempt; those that were asked to leave it before stay asked."""
    asked = dict.fromkeys((*read_leave(layout, attempt=attempt), *hosts))
    write_record(layout.leave, {"hosts": list(asked), "attempt": attempt})


def read_leave(layout: RunLayout, *, attempt: int) -> tuple[str, ...]:
    """Hosts of this attempt that the user wants to leave."""
    said = load_if_there(layout.leave, dict)
    hosts = said.get("hosts") if said and said.get("attempt") == attempt else None
    return tuple(map(str, hosts)) if isinstance(hosts, list) else ()
